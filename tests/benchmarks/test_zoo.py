"""Small models of every type: smaller configurations, mended ones, and what is asked of a plan."""

import pytest
import torch
from torch import nn
from transformers import (
    DepthAnythingConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    VitPoseConfig,
)

from benchmarks.zoo.build import _own, _said
from benchmarks.zoo.exchanged import no_dearer
from benchmarks.zoo.facts import agreement, linear_like, way_back
from benchmarks.zoo.mend import divisible, fit, mend
from benchmarks.zoo.named import never_named
from benchmarks.zoo.reach import enriched, reached, untouched
from benchmarks.zoo.small import ATTEMPTS, small
from tests.hf_models import build
from tpconvert.planning import make_plan
from tpconvert.source.inputs.find import Refusal, Search


def test_a_backbone_with_fewer_layers_gives_out_as_many_features():
    backbone = small(DepthAnythingConfig(), ATTEMPTS[0]).backbone_config
    assert backbone.num_hidden_layers == 4
    assert backbone.out_indices == [1, 2, 3, 4]
    assert backbone.out_features == ["stage1", "stage2", "stage3", "stage4"]


def test_the_last_layer_is_used_where_a_backbone_gives_out_one():
    backbone = small(VitPoseConfig(), ATTEMPTS[0]).backbone_config
    assert (backbone.num_hidden_layers, backbone.out_indices) == (2, [2])


def test_a_missing_number_is_taken_from_the_message():
    config = LlamaConfig(num_key_value_heads=4, hidden_size=64, num_attention_heads=4)
    config.horizon_length = None
    assert mend(config, ValueError("The `horizon_length` config needs to be specified."))
    assert config.horizon_length == 4
    assert not mend(config, ValueError("something else"))


def test_channels_in_a_list_are_made_those_that_come():
    config = DepthAnythingConfig(neck_hidden_sizes=[6, 12, 24, 48])
    error = (
        "weight of size [16, 12, 1, 1], expected input[2, 96, 7, 7] to have 12 channels, but got 96 channels instead"
    )
    assert mend(config, RuntimeError(error))
    assert config.neck_hidden_sizes == [6, 96, 24, 48]


def test_a_width_is_changed_on_the_side_that_has_it():
    config = LlamaConfig(projection_dim=40)
    assert mend(config, RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x40 and 48x2)"))
    assert config.projection_dim == 48


def test_the_last_dim_of_a_reshape_is_made_the_one_that_fits():
    config = LlamaConfig(bbox_dim=64)
    assert mend(config, RuntimeError("shape '[13, 13, 2, 16]' is invalid for input of size 21632"))
    assert config.bbox_dim == 16


def test_a_missing_number_is_that_of_another_part():
    config = LlavaConfig()
    config.vision_config.merge_size = 3
    assert mend(config, AttributeError("'LlamaConfig' object has no attribute 'merge_size'"))
    assert config.text_config.merge_size == 3


def test_widths_that_are_grouped_are_widened_together():
    config = DepthAnythingConfig(fusion_hidden_size=16, head_hidden_size=16)
    assert mend(config, ValueError("num_channels (16) must be divisible by num_groups (32)"))
    assert (config.fusion_hidden_size, config.head_hidden_size) == (32, 32)


def test_queries_become_few_where_there_are_few_places():
    config = LlamaConfig(num_queries=300)
    assert mend(config, RuntimeError("selected index k out of range"))
    assert config.num_queries == 8


@pytest.mark.parametrize(
    "said",
    [
        "stride should not be zero",
        "division by zero",
        "shape '[2, 1, 0, 144]' is invalid for input of size 144",
        "shape '[0, 4]' is invalid for input of size 8",
    ],
)
def test_images_get_more_patches_where_some_of_them_are_merged_to_none(said):
    config = LlamaConfig(image_size=56, patch_size=16, image_grid_pinpoints=[[56, 112]], mm_tokens_per_image=256)
    assert mend(config, RuntimeError(said))
    assert (config.image_size, config.image_grid_pinpoints) == (128, [[128, 256]])
    assert config.mm_tokens_per_image == 256
    assert mend(config, RuntimeError(said))
    assert config.mm_tokens_per_image == 16
    assert not mend(config, RuntimeError(said))


def test_a_shape_without_an_empty_dim_asks_for_no_more_patches():
    said = "shape '[2, 10, 144]' is invalid for input of size 144"
    assert not mend(LlamaConfig(image_size=56, patch_size=16), RuntimeError(said))


def test_a_class_of_a_part_gets_the_configuration_of_that_part():
    config = LlavaConfig()
    assert _own(LlamaForCausalLM, config) is config.text_config
    assert _own(LlavaForConditionalGeneration, config) is config


def test_numbers_are_known_by_their_standard_names_too():
    config = LlamaConfig(attribute_map={"n_group": "clusters"})
    config.clusters = 8
    assert small(config, ATTEMPTS[0]).clusters == 2


def test_rotary_sections_are_made_to_add_up():
    config = LlamaConfig()
    error = "split_with_sizes expects split_sizes to sum exactly to 16 (dimension -1), but got split_sizes=[16, 24, 24]"
    assert mend(config, RuntimeError(error))
    assert config.rope_parameters["mrope_section"] == [4, 6, 6]


def test_rotary_sections_are_those_of_the_words():
    config = Qwen2VLConfig()
    config.vision_config.rope_parameters = {"rope_type": "axial"}
    config.text_config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    config.vocab_size = None
    error = "split_with_sizes expects split_sizes to sum exactly to 16 (dimension -1), but got split_sizes=[16, 24, 24]"
    assert mend(config, RuntimeError(error))
    assert config.text_config.rope_parameters["mrope_section"] == [4, 6, 6]


def test_what_is_said_of_many_inputs_counts_once():
    texts = ["width", "width", "length", "width"]
    refused = [Refusal({"x": i}, ValueError(text), 4 - i) for i, text in enumerate(texts)]
    assert _said(refused) == [refused[0].error, refused[2].error]


def test_heads_are_made_to_divide_the_width():
    config = LlavaConfig(vision_config={"model_type": "siglip_vision_model", "hidden_size": 72})
    config.vision_config.num_attention_heads = 7
    divisible(config)
    assert config.vision_config.num_attention_heads == 6
    config.vision_config.hidden_size, config.vision_config.num_attention_heads = 12, 2
    divisible(config)
    assert config.vision_config.num_attention_heads == 2  # one of 12 would be of quarters, and could not be cut


def test_a_tower_gets_the_width_of_the_words():
    text = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    text |= {"vocab_size": 60, "intermediate_size": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 24, "num_heads": 2, "patch_size": 4}
    marks = {"image_token_id": 57, "video_token_id": 56, "vision_start_token_id": 55, "vision_end_token_id": 54}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **marks)
    from transformers import Qwen2VLForConditionalGeneration

    assert fit(Qwen2VLForConditionalGeneration(config).eval(), config)
    assert config.vision_config.hidden_size == 32


def test_linear_weights_are_told_from_other_matrices():
    module, _ = build("mixtral")
    names = linear_like(module)
    assert "lm_head.weight" in names
    assert "model.layers.0.mlp.experts.down_proj" in names
    assert not {"model.embed_tokens.weight", "model.norm.weight"} & names


def test_a_llama_is_cut_as_transformers_cuts_it_and_comes_back():
    module, inputs = build("llama_few")
    plan = make_plan(module, inputs, tp=2)
    found = agreement(module, inputs, plan)
    assert found["theirs"]["same"] >= 14
    assert found["theirs"]["other"] == found["theirs"]["whole"] == found["more_than_theirs"] == 0
    assert way_back(module, plan) == "identical"


class Head(nn.Module):
    """Logits, for which the model's width is read."""

    def __init__(self, given: int, out: int) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(given), nn.Linear(given, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("given", "style", "ours"),
    [
        (24, "rowwise_split_input", True),  # 64 joined and 2 x 24 summed, for 2 x 64 summed and 24 joined
        (120, "rowwise_split_input", False),  # 64 and 2 x 120, for 2 x 64 and 120
        (24, "rowwise", True),  # for 2 x 64
        (48, "rowwise", False),
        (48, "colwise_gather_output", True),  # the same
    ],
)
def test_what_two_plans_send_is_compared_layer_by_layer(given, style, ours):
    module, inputs = Head(given, 64), {"x": torch.randn(2, 5, given)}
    plan = make_plan(module, inputs, tp=2)
    assert {b.kind for b in plan.boundaries} == {"copy", "gather"}
    assert no_dearer(module, inputs, plan, {"head.weight": style}) == {"head.weight": ours}


class Layout(nn.Module):
    """Reads places only where they are given, and codes that have no gradient."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.codes = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, input_ids, bbox=None):
        """
        bbox (`torch.FloatTensor` of shape `(batch_size, sequence_length, 4)`, *optional*):
            Where each word is.
        """
        out = self.words(input_ids) + self.codes(self.words(input_ids)).argmax(-1, keepdim=True)
        return out if bbox is None else out + self.places(bbox)


def test_inputs_are_added_that_more_parameters_wait_for():
    module = Layout()
    inputs = {"input_ids": torch.zeros(2, 13).long()}
    assert sorted(n for n, _ in untouched(module, inputs)) == [
        "codes.bias",
        "codes.weight",
        "places.bias",
        "places.weight",
    ]
    found = enriched(module, Search(module, LlamaConfig()), inputs)
    assert found["bbox"].shape == (2, 13, 4)
    assert sorted(n for n, _ in untouched(module, found)) == ["codes.bias", "codes.weight"]


class Ahead(nn.Module):
    """Looks ahead with two arguments that hang together, and learns from labels."""

    main_input_name = "input_ids"

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(600, 4)
        self.ahead, self.learns = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, input_ids, future_values=None, future_mask=None, labels=None):
        """
        future_values (`torch.FloatTensor` of shape `(batch_size, 4)`, *optional*):
            What comes.
        future_mask (`torch.LongTensor` of shape `(batch_size, 4)`, *optional*):
            Which of it.
        labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            What is right.
        """
        out = self.words(input_ids)
        if future_values is not None and future_mask is not None:
            out = out + self.ahead(future_values * future_mask)[:, None]
        return out if labels is None else (self.learns(out), labels)


def test_arguments_that_hang_together_are_added_together_and_labels_last():
    module = Ahead()
    inputs = {"input_ids": torch.arange(26).view(2, 13)}
    assert reached(module, inputs) == (2400, 2400 / 2440)
    found = enriched(module, Search(module, LlamaConfig(vocab_size=600)), inputs)
    assert next(iter(found)) == "labels"
    assert found.keys() == {"input_ids", "future_values", "future_mask", "labels"}
    assert torch.equal(found["labels"], inputs["input_ids"])
    assert reached(module, found) == (2440, 1.0)


class Talking(nn.Module):
    """Names its parts in its forward, in a helper that it calls, in a property, and in ``generate()`` alone."""

    def __init__(self):
        super().__init__()
        self.body, self.helped, self.held, self.spoken = (nn.Linear(2, 2) for _ in range(4))
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])

    @property
    def kept(self):
        return self.held.weight

    def helper(self, x):
        return nn.functional.linear(x, self.helped.weight)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.helper(self.body(x)) + self.kept.sum()

    def generate(self, x):
        return self.spoken(self.forward(x))


def test_weights_are_told_that_no_code_of_the_forward_names():
    module = Talking()
    assert never_named(module, linear_like(module)) == {"spoken.weight"}


class Passing(Talking):
    """Gives itself away, so that anything may be used."""

    def forward(self, x):
        return spoken_by(self, x)


def spoken_by(module, x):
    return module.spoken(x)


def test_a_module_that_is_passed_on_whole_may_use_all_of_its_parts():
    assert never_named(Passing(), linear_like(Passing())) == set()
