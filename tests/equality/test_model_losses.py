"""Models of `transformers` and their own losses have plain PyTorch's gradients.

They are weighted by what a loss was divided by.

A loss that cannot be weighed like this is named by a warning. `python
tests/equality/test_model_losses.py` prints the table: how far gradients are off by
rows, and how far by the loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from conditions import for_releases
from problems import deal
from topologies import central, mirrored_with_copies
from torchstrategy import LossWeightWarning, RunOptions

WHY = (
    "needs models of a well-known package, which is not installed: pip install "
    "'.[models]'"
)
transformers: Any = pytest.importorskip("transformers", reason=WHY)

pytestmark = pytest.mark.slow
WORDS, TOKENS, IGNORED = 23, 8, -100
# Words of each row: of two replicas, one gets more rows and even more words.
LENGTHS = (8, 2, 3, 7, 2, 4, 3)
SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
LARGE_WEIGHTS = {"initializer_range": 0.3}  # so that no gradient is next to nothing
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ROUNDING = 3e-6  # most of these losses are computed in float32

Tensors = dict[str, torch.Tensor]


# What models are given


def words() -> Tensors:
    """Words of unlike numbers in each row, and padding behind them."""
    generator = torch.Generator().manual_seed(1)
    mask = (torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.randint(3, WORDS, (len(LENGTHS), TOKENS), generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask}


def with_next_words() -> Tensors:
    given = words()
    return {
        **given,
        "labels": given["input_ids"].masked_fill(given["attention_mask"] == 0, IGNORED),
    }


def with_hidden_words() -> Tensors:
    """Some of the words are to be guessed."""
    given = with_next_words()
    chosen = (
        torch.rand(len(LENGTHS), TOKENS, generator=torch.Generator().manual_seed(2))
        < 0.6
    )
    chosen[:, 0] = True
    return {**given, "labels": given["labels"].masked_fill(~chosen, IGNORED)}


def with_hidden_words_and_order() -> Tensors:
    return {
        **with_hidden_words(),
        "next_sentence_label": torch.arange(len(LENGTHS)) % 2,
    }


def with_tags() -> Tensors:
    given = with_next_words()
    return {
        **given,
        "labels": (given["labels"] % 3).masked_fill(
            given["attention_mask"] == 0, IGNORED
        ),
    }


def with_replaced_words() -> Tensors:
    given = words()
    return {**given, "labels": (given["input_ids"] % 3 == 0).long()}


def with_classes() -> Tensors:
    return {**words(), "labels": torch.arange(len(LENGTHS)) % 3}


def with_answers() -> Tensors:
    """Rows 1 and 2 have no answer.

    Their positions are behind the last word, which the model ignores.
    """
    starts = torch.tensor([3, 99, 99, 0, 1, 2, 0])
    return {
        **words(),
        "start_positions": starts,
        "end_positions": (starts + 1).clamp(max=99),
    }


def images() -> Tensors:
    generator = torch.Generator().manual_seed(3)
    return {
        "pixel_values": torch.randn(
            len(LENGTHS), 3, 8, 8, generator=generator, dtype=torch.float64
        )
    }


def with_segments() -> Tensors:
    """Of each image, some pixels have no class."""
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(3, (len(LENGTHS), 8, 8), generator=generator)
    shown = torch.arange(64).view(8, 8) < 8 * torch.tensor(LENGTHS)[:, None, None]
    return {**images(), "labels": labels.masked_fill(~shown, 255)}


def with_hidden_patches() -> Tensors:
    hidden = torch.tensor(
        [
            [1, 1, 1, 1],
            [0, 1, 0, 0],
            [1, 0, 0, 0],
            [1, 1, 1, 0],
            [0, 0, 0, 1],
            [0, 1, 0, 0],
            [1, 0, 0, 0],
        ]
    )
    return {**images(), "bool_masked_pos": hidden.bool()}


def with_captions() -> dict[str, Any]:
    return {**images(), **words(), "return_loss": True}


def speech() -> Tensors:
    generator = torch.Generator().manual_seed(5)
    sounds = torch.randn(len(LENGTHS), 60, generator=generator, dtype=torch.float64)
    letters = torch.randint(1, 7, (len(LENGTHS), 3), generator=generator)
    is_said = torch.arange(3) < torch.tensor(LENGTHS)[:, None].clamp(max=3)
    mask = torch.ones(len(LENGTHS), 60, dtype=torch.long)
    return {
        "input_values": sounds,
        "attention_mask": mask,
        "labels": letters.masked_fill(~is_said, IGNORED),
    }


# The models


def bert(kind: str, **more: Any) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        max_position_embeddings=12,
        **SMALL,
        **QUIET,
        **LARGE_WEIGHTS,
        **more,
    )
    model: nn.Module = getattr(transformers, f"BertFor{kind}")(config)
    return model


def gpt2() -> nn.Module:
    sizes = {
        "vocab_size": WORDS,
        "n_positions": 12,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
    }
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "loss_type": "ForCausalLM",
    }
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **quiet, **ends, **LARGE_WEIGHTS)
    )


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=WORDS, num_key_value_heads=2, **SMALL, **LARGE_WEIGHTS
    )
    return transformers.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    """Adds a balance of its experts to the loss, which is a product of two means."""
    experts = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
    }
    config = transformers.MixtralConfig(
        vocab_size=WORDS,
        num_key_value_heads=2,
        router_aux_loss_coef=0.1,
        **experts,
        **SMALL,
        **LARGE_WEIGHTS,
    )
    return transformers.MixtralForCausalLM(config)


def t5() -> nn.Module:
    sizes = {
        "vocab_size": WORDS,
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
    }
    config = transformers.T5Config(dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def electra() -> nn.Module:
    config = transformers.ElectraConfig(
        vocab_size=WORDS,
        embedding_size=8,
        max_position_embeddings=12,
        **SMALL,
        **QUIET,
        **LARGE_WEIGHTS,
    )
    return transformers.ElectraForPreTraining(config)


def segformer() -> nn.Module:
    stages = {
        "num_encoder_blocks": 1,
        "depths": [1],
        "sr_ratios": [1],
        "hidden_sizes": [8],
        "patch_sizes": [3],
    }
    more = {
        "strides": [2],
        "num_attention_heads": [2],
        "mlp_ratios": [2],
        "decoder_hidden_size": 8,
        "num_labels": 3,
    }
    config = transformers.SegformerConfig(
        **stages,
        **more,
        **QUIET,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
        semantic_loss_ignore_index=255,
    )
    model: nn.Module = transformers.SegformerForSemanticSegmentation(config)
    for part in model.modules():  # which would normalise the rows of each replica
        if isinstance(part, nn.BatchNorm2d):
            part.forward = lambda inputs: inputs
    return model


def masked_vit() -> nn.Module:
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, encoder_stride=4, **SMALL, **QUIET, **LARGE_WEIGHTS
    )
    return transformers.ViTForMaskedImageModeling(config)


def wav2vec2() -> nn.Module:
    convolutions = {
        "conv_dim": (4, 4),
        "conv_stride": (3, 2),
        "conv_kernel": (4, 3),
        "num_feat_extract_layers": 2,
    }
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    names = ("hidden", "attention", "activation", "feat_proj", "final")
    quiet = {
        **{f"{name}_dropout": 0.0 for name in names},
        "layerdrop": 0.0,
        "apply_spec_augment": False,
    }
    loss = {"vocab_size": 7, "ctc_loss_reduction": "mean", "ctc_zero_infinity": True}
    return transformers.Wav2Vec2ForCTC(
        transformers.Wav2Vec2Config(
            **convolutions, **positions, **quiet, **loss, **SMALL, **LARGE_WEIGHTS
        )
    )


def clip() -> nn.Module:
    """Compares each image with the texts of all rows that it is given."""
    text = {
        "vocab_size": WORDS,
        "max_position_embeddings": 8,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **SMALL,
    }
    vision = {"image_size": 8, "patch_size": 4, **SMALL}
    return transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config=text, vision_config=vision, projection_dim=8
        )
    )


BY_ROWS, BY_LOSS, NAMED = "right by rows", "exact by the loss", "named by a warning"


@dataclass(frozen=True)
class Known:
    """A model, what it is given, and what becomes of its loss."""

    build: Callable[[], nn.Module]
    given: Callable[[], Tensors]
    outcome: str
    words: str = ""  # of the warning
    dtype: torch.dtype = torch.float64


MODELS = {
    "GPT2LMHeadModel": Known(gpt2, with_next_words, BY_LOSS),
    "LlamaForCausalLM": Known(llama, with_next_words, BY_LOSS),
    # Its tokens are weighed, and its balance is not. Its experts multiply no float64.
    "MixtralForCausalLM": Known(
        mixtral,
        with_next_words,
        NAMED,
        "multiplies two means over the rows",
        torch.float32,
    ),
    "T5ForConditionalGeneration": Known(t5, with_next_words, BY_LOSS),
    "BertForMaskedLM": Known(lambda: bert("MaskedLM"), with_hidden_words, BY_LOSS),
    "BertForPreTraining": Known(
        lambda: bert("PreTraining"), with_hidden_words_and_order, BY_LOSS
    ),
    "BertForTokenClassification": Known(
        lambda: bert("TokenClassification", num_labels=3), with_tags, BY_LOSS
    ),
    "BertForQuestionAnswering": Known(
        lambda: bert("QuestionAnswering"),
        with_answers,
        NAMED,
        "is a mean of several terms",
    ),
    "BertForSequenceClassification": Known(
        lambda: bert("SequenceClassification", num_labels=3), with_classes, BY_ROWS
    ),
    "ElectraForPreTraining": Known(electra, with_replaced_words, BY_LOSS),
    "SegformerForSemanticSegmentation": Known(segformer, with_segments, BY_LOSS),
    "ViTForMaskedImageModeling": Known(masked_vit, with_hidden_patches, BY_LOSS),
    "Wav2Vec2ForCTC": Known(wav2vec2, speech, BY_ROWS),
    "CLIPModel": Known(clip, with_captions, NAMED, "compares rows with one another"),
}


def made(known: Known) -> Any:
    torch.manual_seed(0)
    return known.build().to(known.dtype).train()


def gradients_of(model: nn.Module) -> torch.Tensor:
    found = [
        p.grad.detach().cpu().double().flatten()
        for p in model.parameters()
        if p.grad is not None
    ]
    return torch.cat(found)


def plain(known: Known) -> torch.Tensor:
    model = made(known)
    model(**known.given()).loss.backward()
    return gradients_of(model)


def off_by(
    known: Known, strategy: torchstrategy.Strategy, options: RunOptions | None
) -> tuple[float, list[str]]:
    """How far a step's gradients are off, as a part of their norm; the warnings."""
    model = strategy.distribute_module(made(known))
    batch = deal(strategy, known.given())

    def step(batch: Any) -> None:
        model(**batch).loss.backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.run(step, args=(batch,), options=options)
        found = gradients_of(model)
        # What multiplies a mean may be a constant: it is known to be none where it has
        # changed.
        strategy.run(step, args=(deal(strategy, known.given()),), options=options)
    expected = plain(known)
    told = [str(one.message) for one in caught if one.category is LossWeightWarning]
    return float((found - expected).norm() / expected.norm()), told


KINDS = {
    "central, 2": lambda: central(2),
    "mirrored, 3": lambda: mirrored_with_copies(3),
}


@for_releases
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_the_own_loss_of_a_model(name: str, kind: str) -> None:
    known = MODELS[name]
    by_rows, _ = off_by(known, KINDS[kind](), RunOptions(gradient_reduction="mean"))
    by_loss, told = off_by(known, KINDS[kind](), RunOptions(gradient_reduction="loss"))
    assert (by_rows < ROUNDING) == (known.outcome == BY_ROWS), by_rows
    if known.outcome == NAMED:
        assert [known.words in one for one in told] == [True]
    else:
        assert by_loss < ROUNDING and not told


@pytest.mark.parametrize(
    "name", [name for name, known in MODELS.items() if known.outcome == BY_LOSS]
)
def test_by_default_a_loss_over_tokens_is_warned_of(name: str) -> None:
    _, told = off_by(MODELS[name], central(2), None)
    assert len(told) == 1 and 'needs RunOptions(gradient_reduction="loss")' in told[0]


def main() -> None:
    for kind, make in KINDS.items():
        print(
            f"\n{kind:34}{'by rows':>10}{'by loss':>10}  told by default / under loss"
        )
        for name, known in MODELS.items():
            try:
                by_rows, _ = off_by(
                    known, make(), RunOptions(gradient_reduction="mean")
                )
                by_loss, told = off_by(
                    known, make(), RunOptions(gradient_reduction="loss")
                )
                _, warned = off_by(known, make(), None)
            except Exception as error:
                print(f"{name:34}{type(error).__name__}: {error}"[:300])
                continue
            print(
                f"{name:34}{by_rows:10.1e}{by_loss:10.1e}  {len(warned)} / "
                f"{''.join(told)[:110]}"
            )


if __name__ == "__main__":
    main()
