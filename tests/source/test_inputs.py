"""Example inputs: by docstring and config, for every tower, and mended by what a forward says."""

import json

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

from tpconvert.errors import SourceError
from tpconvert.source import open_source
from tpconvert.source.inputs.documented import arguments, example, size_of
from tpconvert.source.inputs.find import Search, example_inputs
from tpconvert.source.inputs.media import images
from tpconvert.source.inputs.towers import Tower, with_towers

TEXT = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 60,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {"hidden_size": 20, "intermediate_size": 18, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAVA = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 57,
    "text_config": TEXT | {"model_type": "llama"},
    "vision_config": VISION | {"model_type": "clip_vision_model", "image_size": 12, "patch_size": 4},
}
QWEN = {
    "model_type": "qwen2_vl",
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "image_token_id": 57,
    "video_token_id": 56,
    "vision_start_token_id": 55,
    "vision_end_token_id": 54,
    "text_config": TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}},
    "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 24, "num_heads": 2, "patch_size": 4},
}
AUDIO = {
    "model_type": "audioflamingo3",
    "architectures": ["AudioFlamingo3ForConditionalGeneration"],
    "audio_token_id": 57,
    "text_config": TEXT | {"model_type": "qwen2"},
    "audio_config": {
        "model_type": "audioflamingo3_encoder",
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_mel_bins": 8,
        "max_source_positions": 10,
    },
}


def open_config(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return open_source(str(folder))


def unreached(source):
    """The parameters that the output does not depend on."""
    module = source.build()
    module(**source.inputs).logits.sum().backward()
    return {name for name, p in module.named_parameters() if p.grad is None and p.requires_grad}


def test_an_image_has_as_many_marks_among_the_words_as_it_has_features(tmp_path):
    source = open_config(tmp_path, LLAVA)
    assert source.inputs["pixel_values"].shape == (2, 3, 12, 12)
    assert (source.inputs["input_ids"] == 57).sum(1).tolist() == [9, 9]
    assert not [n for n in unreached(source) if "projector" in n or "patch_embedding" in n]


def test_images_and_videos_on_grids_reach_every_parameter(tmp_path):
    source = open_config(tmp_path, QWEN)
    inputs = source.inputs
    assert inputs["image_grid_thw"].prod(1).sum() == len(inputs["pixel_values"])
    assert inputs["video_grid_thw"].prod(1).sum() == len(inputs["pixel_values_videos"])
    assert (inputs["input_ids"] == 57).sum(1).tolist() == [4, 4]
    assert torch.equal(inputs["mm_token_type_ids"] == 1, inputs["input_ids"] == 57)
    assert torch.equal(inputs["mm_token_type_ids"] == 2, inputs["input_ids"] == 56)
    assert unreached(source) == set()


def test_sounds_have_marks_too(tmp_path):
    source = open_config(tmp_path, AUDIO)
    assert "input_features" in source.inputs
    assert (source.inputs["input_ids"] == 57).sum() > 0
    assert unreached(source) == set()


# -- docstrings -------------------------------------------------------------------------------------------------


class Config(PretrainedConfig):
    model_type = "made-up"

    def __init__(self, width=6, patch_size=4, num_channels=3, image_size=8, **more):
        self.width, self.patch_size, self.num_channels, self.image_size = width, patch_size, num_channels, image_size
        super().__init__(**more)


class Documented(nn.Module):
    main_input_name = "states"

    def __init__(self, config):
        super().__init__()
        self.linear = nn.Linear(config.width, 5)

    def forward(self, states, bias=None, labels=None):
        """
        states (`torch.FloatTensor` of shape `(batch_size, sequence_length, width)`):
            What is read.
        bias (`torch.LongTensor` of shape `(batch_size, 1)`, *optional*):
            What is added.
        """
        if bias is None:
            raise ValueError("You have to specify `bias`")
        return self.linear(states) + bias[:, None]


def test_a_docstring_gives_types_and_shapes():
    found = arguments(Documented(Config()).forward)
    assert (found["states"].dims, found["states"].required) == (("batch_size", "sequence_length", "width"), True)
    assert (found["bias"].kind, found["labels"].dims) == ("LongTensor", ())
    assert example(found["states"], Config()).shape == (2, 13, 6)


def test_a_docstring_may_quote_as_strings_are_quoted():
    def forward(boxes, sides):
        """
        boxes ('torch.FloatTensor' of shape '(batch_size, num_boxes, 4)'):
            Where.
        sides (`'torch.LongTensor'` of shape '(batch_size, 2)'):
            How large.
        """

    found = arguments(forward)
    assert (found["boxes"].kind, found["boxes"].dims) == ("FloatTensor", ("batch_size", "num_boxes", "4"))
    assert (found["sides"].kind, found["sides"].dims) == ("LongTensor", ("batch_size", "2"))


@pytest.mark.parametrize(
    ("dim", "size"),
    [("num_channels * patch_size * patch_size", 48), ("2 + width", 8), ("image_size", 8), ("4", 4), ("batch_size", 2)],
)
def test_a_dim_is_a_formula_of_the_numbers_of_the_config(dim, size):
    assert size_of(dim, Config()) == size


class Asked(nn.Module):
    def forward(self, pixel_values, places):
        """Looks."""

    def get_image_features(self, *, pixel_values, places):
        """
        places (`torch.LongTensor` of shape `(num_images, patch_height)`):
            Where.
        """


def test_what_a_tower_says_of_an_argument_is_known_of_the_forward_too():
    search = Search(Asked(), Config())
    assert search.arguments["places"].dims == ("num_images", "patch_height")
    assert next(search.forms("places", {}))["places"].shape == (2, 4)


def test_what_a_forward_asks_for_is_given():
    inputs = example_inputs(Documented(Config()), Config())
    assert {n: (v.shape, v.dtype) for n, v in inputs.items()} == {
        "states": ((2, 13, 6), torch.float32),
        "bias": ((2, 1), torch.long),
    }


def test_a_width_is_made_the_one_that_is_expected():
    module = Documented(Config(width=10))
    assert example_inputs(module, Config(width=6))["states"].shape == (2, 13, 10)


def test_patches_have_the_dims_that_are_documented():
    dims = ("num_image_tokens", "patch_size * 2", "patch_size * 2", "num_channels")
    found = images("pixel_values", {"image_grid_thw"}, Config(), dims)
    assert (32, 8, 8, 3) in [given["pixel_values"].shape for given in found]


def test_no_patch_is_as_large_as_a_whole_image():
    dims = ("num_patches", "num_channels", "image_size", "image_size")
    found = list(images("pixel_values_videos", {"video_grid_thw"}, Config(image_size=224), dims))
    assert found
    assert all(given["pixel_values_videos"].numel() < 2_000_000 for given in found)


def test_patches_of_all_images_lie_beside_each_other_where_their_sizes_are_asked_for():
    given = next(images("pixel_values", {"target_sizes"}, Config()))
    assert given["pixel_values"].shape == (1, 3, 4, 4 * int(given["target_sizes"].prod(1).sum()))


class Seeing(Documented):
    """Takes words alone, and images with places."""

    main_input_name = "input_ids"

    def forward(self, input_ids, pixel_values=None, places=None):
        """
        places (`torch.LongTensor` of shape `(batch_size, 1)`, *optional*):
            Where.
        """
        if pixel_values is not None and places is None:
            raise ValueError("`places` must be given with images")
        return input_ids


def test_words_alone_are_not_enough_where_images_were_nearly_taken():
    assert example_inputs(Seeing(Config()), Config()).keys() == {"input_ids", "pixel_values", "places"}


class Marking(Documented):
    """Wants a mark for each of six features of its two images, which only the whole of it can count."""

    main_input_name = "input_ids"

    def forward(self, input_ids, pixel_values=None):
        marks = int((input_ids == 7).sum())
        if pixel_values is not None and marks != 6:
            raise ValueError(f"Image features and image tokens do not match, tokens: {marks}, features: 6")
        return input_ids


def test_an_error_asks_for_as_many_marks_as_there_are_features():
    config = Config(image_token_id=7)
    inputs = example_inputs(Marking(config), config)
    assert (inputs["input_ids"] == 7).sum(1).tolist() == [3, 3]


class Pointing(Documented):
    """Reads an image only where a word points at it, and wants such a word for each of six features."""

    main_input_name = "input_ids"

    def forward(self, input_ids, pixel_values=None):
        marks = int((input_ids == 7).sum())
        if pixel_values is not None and marks not in (0, 6):
            had = f"[{marks}, 5]"
            raise RuntimeError(f"value tensor of shape [6, 5] cannot be broadcast to indexing result of shape {had}")
        return input_ids


def test_words_that_point_at_images_are_mended_before_others_are_tried():
    config = Config(image_token_id=7)
    inputs = example_inputs(Pointing(config), config)
    assert "pixel_values" in inputs
    assert (inputs["input_ids"] == 7).sum(1).tolist() == [3, 3]


class Proteins(nn.Module):
    """Takes words of two kinds, the second with a mask over it."""

    main_input_name = "input_ids"

    def forward(self, input_ids, protein_input_ids=None, protein_attention_mask=None):
        return input_ids, protein_input_ids, protein_attention_mask


class Placed(nn.Module):
    """Takes the place of each word."""

    main_input_name = "input_ids"

    def forward(self, input_ids, position_ids=None):
        """
        position_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Where each word is.
        """
        return input_ids + position_ids


def test_each_word_has_a_place_of_its_own():
    given = next(Search(Placed(), Config()).forms("position_ids", {"input_ids": torch.zeros(2, 17).long()}))
    assert torch.equal(given["position_ids"], torch.arange(17).repeat(2, 1))


def test_marks_of_each_time_of_a_video_may_have_words_between_them():
    grid = {"video_grid_thw": torch.tensor([[2, 2, 2]] * 2)}
    tower = Tower("video", grid, mark=7, count=4, width=1, around=((8,), (9,)))
    found = with_towers([tower], nn.Module(), Config(), {"mm_token_type_ids"}, list, lambda: torch.zeros(2, 4).long())
    together, apart = (given["input_ids"][0].tolist() for given in found)
    assert together == [0, 0, 0, 8, 7, 7, 7, 7, 9, 0]
    assert apart == [0, 0, 0, 8, 7, 7, 9, 0, 8, 7, 7, 9, 0]


def test_a_mask_is_as_long_as_the_words_of_its_kind():
    search = Search(Proteins(), Config())
    given = {"protein_input_ids": torch.zeros(2, 7).long()}
    assert next(search.forms("protein_attention_mask", given))["protein_attention_mask"].shape == (2, 7)


class Inner(nn.Module):
    """Its image must have a side of its own, and makes two features."""

    def get_image_features(self, pixel_values):
        if pixel_values.shape[-1] != 5:
            raise ValueError(f"Input width ({pixel_values.shape[-1]}) doesn't match model (5).")
        return pixel_values.new_zeros(2, 2, 6)


class Outer(Seeing):
    """Has a part that can be asked for features."""

    def __init__(self, config):
        super().__init__(config)
        self.inner = Inner()

    def forward(self, input_ids, pixel_values=None):
        if pixel_values is not None:
            assert (input_ids == 7).sum() == self.inner.get_image_features(pixel_values)[..., 0].numel()
        return input_ids


def test_a_tower_in_a_part_is_asked_with_images_of_its_size():
    config = Config(image_token_id=7)
    inputs = example_inputs(Outer(config), config)
    assert inputs["pixel_values"].shape[-2:] == (5, 5)
    assert (inputs["input_ids"] == 7).sum(1).tolist() == [2, 2]


def test_an_input_of_which_nothing_is_known_is_told():
    class Unknown(nn.Module):
        main_input_name = "thing"

        def forward(self, thing):
            return thing

    with pytest.raises(SourceError, match="no example is known for the input 'thing'"):
        example_inputs(Unknown(), Config())


def test_a_class_without_a_forward_is_told():
    class Parts(nn.Module):
        def encode(self, states):
            return states

    with pytest.raises(SourceError, match="Parts has no forward"):
        example_inputs(Parts(), Config())
