"""How models of the zoo are made small: their widths, their layers, and what they are given."""

import pytest
import torch
from torch import nn
from transformers import (
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from benchmarks.zoo.build import Built, _lighter, _narrower
from benchmarks.zoo.small import ATTEMPTS, small


def test_sizes_of_features_become_smaller_with_the_images():
    config = LlamaConfig(backbone_feature_sizes=[[256, 256], [64, 64]], image_size=1024)
    smaller = small(config, ATTEMPTS[0])
    assert (smaller.image_size, smaller.backbone_feature_sizes) == (256, [[64, 64], [16, 16]])


def test_no_attempt_is_made_twice():
    assert len(set(ATTEMPTS)) == len(ATTEMPTS)


class Wide(nn.Module):
    """Makes many numbers of a large image, takes none smaller than 100, and keeps how large the last one was."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)

    def forward(self, pixel_values):
        self.side = pixel_values.shape[-1]
        assert self.side > 100
        return self.conv(pixel_values)


def test_images_are_cropped_as_far_as_the_model_takes_them(monkeypatch):
    monkeypatch.setattr("benchmarks.zoo.build.LIGHT", 1)
    built = Built(Wide(), {"pixel_values": torch.zeros(2, 3, 200, 200)}, "small", 10**6)
    found = _lighter(lambda config: Wide(), LlamaConfig(), ATTEMPTS[0], built)
    assert found.inputs["pixel_values"].shape == (2, 3, 128, 128)
    assert found.by.endswith("cropped to 128")
    assert found.module.side == 128


def test_what_is_made_longer_by_a_model_is_given_to_it_short(monkeypatch):
    monkeypatch.setattr("benchmarks.zoo.build.LIGHT", 1)
    linear = nn.Linear(8, 8)
    built = Built(linear, {"input": torch.zeros(2, 40, 8)}, "small", 640)
    found = _lighter(lambda config: linear, LlamaConfig(), ATTEMPTS[0], built)
    assert (found.by, found.inputs["input"].shape) == ("small, shortened", (2, 5, 8))


def test_a_model_with_many_parameters_is_made_narrower(monkeypatch):
    monkeypatch.setattr("benchmarks.zoo.build.MANY", 40_000)
    config = LlamaConfig(hidden_size=64, intermediate_size=256, num_attention_heads=4, num_hidden_layers=1)
    config.vocab_size = config.num_key_value_heads = 4
    built = Built(LlamaForCausalLM(config).eval(), {"input_ids": torch.zeros(2, 5).long()}, "small")
    found = _narrower(LlamaForCausalLM, built)
    assert (found.by, found.module.config.intermediate_size) == ("small, narrowed", 64)
    assert found.inputs.keys() >= {"input_ids"}


def test_a_scan_takes_few_places_at_a_time():
    assert small(LlamaConfig(mamba_chunk_size=256), ATTEMPTS[0]).mamba_chunk_size == 16


def test_pieces_of_a_sound_are_no_chunks_of_a_scan():
    assert (
        small(LlamaConfig(acoustic_tokenizer_chunk_size=1440000), ATTEMPTS[0]).acoustic_tokenizer_chunk_size == 1440000
    )


def test_the_layers_that_are_read_are_the_last_ones_also_where_they_are_listed_from_the_last():
    config = LlamaConfig(vision_feature_layer=[24, 18], insert_layer_id=6, num_hidden_layers=25)
    smaller = small(config, ATTEMPTS[0])
    assert (smaller.vision_feature_layer, smaller.insert_layer_id) == ([1, 0], 1)


def test_a_count_of_stages_stays_with_the_lists_of_them():
    config = LlamaConfig(depths=(2, 2, 2, 2), patch_sizes=(16, 6, 5, 4), num_hidden_layers=4)
    assert small(config, ATTEMPTS[0]).num_hidden_layers == 4


@pytest.mark.parametrize(("size", "smaller"), [(80, 80), (512, 128)])
def test_bins_of_a_sound_are_no_side_of_an_image(size, smaller):
    assert small(LlamaConfig(input_size=size), ATTEMPTS[0]).input_size == smaller


def test_videos_get_few_frames():
    assert small(LlamaConfig(frames_per_clip=64), ATTEMPTS[0]).frames_per_clip == 8


def test_forecasts_look_back_to_few_times():
    assert small(LlamaConfig(context_length=16384), ATTEMPTS[0]).context_length == 256


def test_margins_of_images_become_smaller_with_them():
    smaller = small(LlamaConfig(max_img_size=448, visual_prompt_size=96), ATTEMPTS[0])
    assert (smaller.max_img_size, smaller.visual_prompt_size) == (112, 24)


def test_a_mixture_made_small_keeps_widths_that_grouped_kernels_take() -> None:
    made = small(GptOssConfig(), ATTEMPTS[0])
    assert (made.hidden_size, made.intermediate_size) == (192, 192)
    assert made.head_dim == 16
    assert small(LlamaConfig(hidden_size=2880), ATTEMPTS[0]).hidden_size == 180
