"""Images and sounds as the processors of transformers lay them out."""

import pytest
import torch
from transformers import LlamaConfig, MllamaConfig, VibeVoiceAsrConfig

from tpconvert.source.inputs.documented import random
from tpconvert.source.inputs.processed import processed


def test_processors_lay_images_out_for_the_sizes_of_the_config():
    pytest.importorskip("PIL")
    vision = {"image_size": 28, "patch_size": 7, "max_num_tiles": 3, "supported_aspect_ratios": [[1, 1], [1, 2]]}
    config = MllamaConfig(vision_config=vision)
    first = next(processed(config))
    assert first["pixel_values"].shape == (2, 1, 3, 3, 28, 28)
    assert first["aspect_ratio_ids"].shape == (2, 1)
    assert first["aspect_ratio_mask"].sum() == 2


def test_processors_lay_sounds_out_with_masks_over_them():
    sizes = [(g["input_values"].shape, g["padding_mask"].shape) for g in processed(VibeVoiceAsrConfig())]
    assert sizes == [((2, 1, 6400), (2, 6400)), ((2, 1, 32000), (2, 32000))]


def test_a_model_type_without_processors_has_nothing_made():
    assert list(processed(LlamaConfig())) == []


def test_images_have_detail_of_every_size_and_small_inputs_stay_between_zero_and_one():
    image = random(2, 3, 224, 224)
    assert abs(image.mean()) < 0.2 and 0.8 < image.std() < 1.2
    blocks = torch.nn.functional.avg_pool2d(image, 32)
    assert blocks.std() > 0.4  # noise of single pixels has 0.03 left of it
    assert len(random(2, 4801).unique()) > 4800
    small = random(2, 13, 24)
    assert torch.equal(small, torch.rand(2, 13, 24, generator=torch.Generator().manual_seed(0)))
