"""Example inputs that an error asks to have other sizes."""

import pytest
import torch

from tpconvert.source.inputs.resize import resized


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("mat1 and mat2 shapes cannot be multiplied (26x6 and 10x48)", (2, 13, 10)),
        ("The size of tensor a (13) must match the size of tensor b (7) at non-singleton dimension 1", (2, 7, 6)),
        ("expects the features to be of length 20, but found 13", (2, 20, 6)),
        ("expects `length` to be a multiple of `n * 2` (10), but got 13", (2, 20, 6)),
        ("length 13 is not a multiple of 4", (2, 16, 6)),
        ("must match except in dimension 2. Expected size 13 but got size 9 for tensor number 1", (2, 9, 6)),
        ("expected input[2, 13, 6] to have 8 channels, but got 13 channels instead", (2, 8, 6)),
        ("normalized_shape=[9], expected input with shape [*, 9], but got input of size[2, 13, 6]", (2, 13, 9)),
        ("Calculated input size: (1). Kernel size can't be greater than actual input size", (2, 13, 4001)),
        ("not enough values to unpack (expected 5, got 3)", (2, 1, 1, 13, 6)),
        ("weight of size [3, 1, 7], expected input[1, 2, 13] to have 1 channels, but got 2 channels instead", None),
        ("something else", None),
    ],
)
def test_an_error_asks_for_another_size(text, shape):
    found = next(resized({"x": torch.zeros(2, 13, 6)}, text, torch.zeros), None)
    assert (found and found["x"].shape) == shape


def test_images_grow_to_what_the_model_has():
    images = {"pixel_values": torch.zeros(2, 3, 8, 6)}
    found = next(resized(images, "Input image size (16*6) doesn't match model (8*12).", torch.zeros))
    assert found["pixel_values"].shape == (2, 3, 4, 12)
    found = next(resized(images, "Image size 8x6 is too small to be scaled", torch.zeros))
    assert found["pixel_values"].shape == (2, 3, 32, 24)
    found = next(resized(images, "Input height (8) doesn't match model (16).", torch.zeros))
    assert found["pixel_values"].shape == (2, 3, 16, 12)


def test_sounds_get_the_channel_that_a_convolution_asks_for():
    text = "weight of size [3, 1, 7], expected input[1, 2, 13] to have 1 channels, but got 2 channels instead"
    assert next(resized({"x": torch.zeros(2, 13)}, text, torch.zeros))["x"].shape == (2, 1, 13)


def test_sounds_are_made_longer_as_often_as_a_deep_stack_of_convolutions_asks():
    text = "input size per channel: (5). Kernel size: (8). Kernel size can't be greater than actual input size"
    assert next(resized({"x": torch.zeros(2, 4001)}, text, torch.zeros))["x"].shape == (2, 8002)
    assert next(resized({"x": torch.zeros(2, 64016)}, text, torch.zeros), None) is None


def test_images_can_be_halved_and_doubled_again():
    text = "Sizes of tensors must match except in dimension 1. Expected size 8 but got size 7 for tensor number 1"
    assert next(resized({"x": torch.zeros(2, 3, 56, 70)}, text, torch.zeros))["x"].shape == (2, 3, 64, 128)


def test_text_is_repeated_for_every_codebook():
    given = {"decoder_input_ids": torch.zeros(2, 7).long()}
    text = "shape '[-1, 4, 7]' is invalid for input of size 14"
    assert next(resized(given, text, torch.zeros))["decoder_input_ids"].shape == (8, 7)


def test_what_is_counted_is_not_none():
    given = {"classes": torch.zeros(2).long(), "ids": torch.zeros(2, 7).long()}
    (found,) = resized(given, "max(): Expected reduction dim 2 to have non-zero size.", torch.zeros)
    assert found["classes"].tolist() == [1, 1] and not found["ids"].any()


def test_boxes_are_as_many_as_words_where_each_meets_each():
    given = {"input_ids": torch.zeros(2, 13).long(), "bbox": torch.zeros(2, 3, 4)}
    (found,) = resized(given, "shape '[13, 13, 2, 16]' is invalid for input of size 1152", torch.zeros)
    assert found["bbox"].shape == (2, 13, 4)


def test_images_that_are_put_together_shrink_together():
    images = {"pixel_values": torch.zeros(2, 3, 8, 6), "prompts": torch.zeros(2, 3, 8, 6)}
    found = list(resized(images, "Input image size (16*6) doesn't match model (8*6).", torch.zeros))
    assert [tuple(new[n].shape[2] for n in images) for new in found] == [(4, 8), (8, 4), (4, 4)]


def test_a_mask_over_sounds_becomes_as_long_as_they_do():
    sounds = {"x": torch.zeros(2, 5, 13), "x_mask": torch.ones(2, 13)}
    found = next(resized(sounds, "expects `length` to be a multiple of `n * 2` (10), but got 13", torch.zeros))
    assert (found["x"].shape, found["x_mask"].shape) == ((2, 5, 20), (2, 20))


def test_text_becomes_as_long_as_what_it_meets():
    given = {"input_ids": torch.zeros(2, 13).long(), "attention_mask": torch.ones(2, 13).long()}
    text = "The size of tensor a (13) must match the size of tensor b (8) at non-singleton dimension 1"
    books, text = list(resized(given, text, lambda *dims: torch.zeros(2, *dims)))
    assert books["input_ids"].shape == (2, 13, 8)
    assert text["input_ids"].shape == text["attention_mask"].shape == (2, 8)


def test_a_mask_gets_as_many_places_as_there_are_features():
    given = {
        "input_ids": torch.zeros(2, 13).long(),
        "attention_mask": torch.ones(2, 13),
        "places_mask": torch.ones(2, 13),
    }
    text = "shape mismatch: value tensor of shape [8, 6] cannot be broadcast to indexing result of shape [26, 6]"
    found = [given["places_mask"] for given in resized(given, text, lambda *dims: torch.zeros(2, *dims))]
    assert found[-1].sum(1).tolist() == [4, 4]
    assert found[-1].shape == (2, 17)
