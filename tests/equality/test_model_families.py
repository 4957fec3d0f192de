"""Model families of well-kept packages train in replicas as in plain PyTorch.

They are made with random weights.

Each step is written as people write it who use these packages. The extra `models`
installs them.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import torchstrategy
from conditions import for_changes, for_releases
from problems import assert_close, context, deal, gradients, sgd
from topologies import SIMULATED, central, central_with_copies, compute_devices
from torchstrategy._turns.switch import IN_TURNS
from torchstrategy.nn import SyncBatchNorm, compute_average_loss

WHY = (
    "needs models of well-known packages, which are not installed: pip install "
    "'.[models]'"
)
transformers: Any = pytest.importorskip("transformers", reason=WHY)
tokenizers: Any = pytest.importorskip("tokenizers", reason=WHY)
with warnings.catch_warnings():
    # It calls torch.jit.script while it is imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", FutureWarning)  # the same in torch 2.14
    pyg: Any = pytest.importorskip("torch_geometric", reason=WHY)
    gnn: Any = pytest.importorskip("torch_geometric.nn", reason=WHY)

pytestmark = pytest.mark.slow
ROWS = (6, 7, 2)  # three replicas get 2, 2, 2; then 3, 3, 1; then 1, 1, 0
IGNORED = -100
LARGE_WEIGHTS = {"initializer_range": 0.3}  # so that no gradient is next to nothing
SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    **LARGE_WEIGHTS,
}
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WORDS = 19


@dataclass(frozen=True)
class Family:
    """A kind of model, and how it is trained."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Any]
    loss: Callable[[Any, Any], torch.Tensor]  # in replicas
    # Of the whole batch; None: the same.
    plain_loss: Callable[[Any, Any], torch.Tensor] | None = None
    tolerance: float = 1e-10

    def made(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().to(torch.float64).train()

    def batches(self) -> list[Any]:
        return [
            self.batch(rows, torch.Generator().manual_seed(seed))
            for seed, rows in enumerate(ROWS)
        ]


def own_loss(model: Any, batch: Any) -> torch.Tensor:
    """The loss that the model has itself: a mean of its rows."""
    return model(**batch).loss


# ---- text


def gpt2() -> nn.Module:
    sizes = {
        "vocab_size": WORDS,
        "n_positions": 12,
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
    }
    without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    words = {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "loss_type": "ForCausalLM",
    }
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **without_dropout, **words, **LARGE_WEIGHTS)
    )


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        max_position_embeddings=12,
        num_labels=3,
        **WITHOUT_DROPOUT,
        **SMALL,
    )
    return transformers.BertForSequenceClassification(config)


def t5() -> nn.Module:
    sizes = {
        "vocab_size": WORDS,
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 16,
        "num_layers": 2,
        "num_heads": 2,
    }
    config = transformers.T5Config(dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def sentences(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Some words each, between two and six of them."""
    lengths = torch.randint(2, 7, (rows, 1), generator=generator)
    mask = (torch.arange(6) < lengths).long()
    return {
        "input_ids": torch.randint(3, WORDS, (rows, 6), generator=generator) * mask,
        "attention_mask": mask,
    }


def with_tokens(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    batch = sentences(rows, generator)
    return {
        **batch,
        "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED),
    }


def with_classes(rows: int, generator: torch.Generator) -> Any:
    """What a tokenizer makes: a mapping that is no dict."""
    classes = torch.randint(3, (rows,), generator=generator)
    return transformers.BatchEncoding({**sentences(rows, generator), "labels": classes})


def next_tokens(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).logits
    return logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:]


def translated_tokens(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model(**batch).logits.transpose(1, 2), batch["labels"]


def over_all_tokens(tokens: Any, model: Any, batch: Any) -> torch.Tensor:
    """The mean over the tokens of all replicas, of which each has another number."""
    logits, labels = tokens(model, batch)
    return compute_average_loss(
        F.cross_entropy(logits, labels, reduction="none"), labels != IGNORED
    )


def over_tokens(tokens: Any, model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(*tokens(model, batch), ignore_index=IGNORED)


def of_tokens(tokens: Any) -> dict[str, Any]:
    return {
        "loss": functools.partial(over_all_tokens, tokens),
        "plain_loss": functools.partial(over_tokens, tokens),
    }


# ---- images, sound


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, num_labels=3, **WITHOUT_DROPOUT, **SMALL
    )
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    """With batch normalisation in each layer."""
    sizes = {
        "embedding_size": 4,
        "hidden_sizes": [4, 8],
        "depths": [1, 2],
        "layer_type": "basic",
    }
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(num_labels=3, **sizes)
    )


def images(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(
            rows, 3, 8, 8, generator=generator, dtype=torch.float64
        )
    }


def with_labels(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        **images(rows, generator),
        "labels": torch.randint(3, (rows,), generator=generator),
    }


def wav2vec2() -> nn.Module:
    """Convolutions with a group norm, and one with a weight norm.

    They are below a transformer, with a loss of alignments.
    """
    convolutions = {
        "conv_dim": (4, 4),
        "conv_stride": (3, 2),
        "conv_kernel": (4, 3),
        "num_feat_extract_layers": 2,
    }
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    names = ("hidden", "attention", "activation", "feat_proj", "final")
    without_noise = {
        **{f"{name}_dropout": 0.0 for name in names},
        "layerdrop": 0.0,
        "apply_spec_augment": False,
    }
    loss = {"vocab_size": 7, "ctc_loss_reduction": "mean", "ctc_zero_infinity": True}
    config = transformers.Wav2Vec2Config(
        **convolutions, **positions, **without_noise, **loss, **SMALL
    )
    return transformers.Wav2Vec2ForCTC(config)


def speech(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    mask = (
        torch.arange(60) < torch.randint(40, 61, (rows, 1), generator=generator)
    ).long()
    sounds = torch.randn(rows, 60, generator=generator, dtype=torch.float64) * mask
    letters = torch.randint(1, 7, (rows, 3), generator=generator)
    is_said = torch.arange(3) < torch.randint(1, 4, (rows, 1), generator=generator)
    return {
        "input_values": sounds,
        "attention_mask": mask,
        "labels": letters.masked_fill(~is_said, IGNORED),
    }


def clip() -> nn.Module:
    words = {
        "vocab_size": WORDS,
        "max_position_embeddings": 8,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    text, vision = {**words, **SMALL}, {"image_size": 8, "patch_size": 4, **SMALL}
    config = transformers.CLIPConfig(
        text_config=text, vision_config=vision, projection_dim=8
    )
    return transformers.CLIPModel(config)


def captioned(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {**images(rows, generator), **sentences(rows, generator)}


def contrasted(model: Any, batch: Any) -> torch.Tensor:
    """Each image is compared with all texts, and each text with all images.

    They are those of all replicas.
    """
    output = model(**batch)
    texts, images = context().all_gather(
        (output.text_embeds, output.image_embeds), axis=0
    )
    similarity = model.logit_scale.exp() * texts @ images.T
    pairs = torch.arange(len(texts), device=texts.device)
    return (
        F.cross_entropy(similarity, pairs) + F.cross_entropy(similarity.T, pairs)
    ) / 2


def contrasted_by_the_package(model: Any, batch: Any) -> torch.Tensor:
    return model(**batch, return_loss=True).loss


# ---- graphs


class GraphNetwork(nn.Module):
    """Says something of each node, of which graphs have different numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = gnn.GCNConv(3, 4)
        self.norm = gnn.BatchNorm(4)
        self.second = gnn.GATConv(4, 4)
        self.third = gnn.GINConv(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        self.last = nn.Linear(8, 2)

    def forward(self, graphs: Any) -> torch.Tensor:
        x = self.norm(self.first(graphs.x, graphs.edge_index)).tanh()
        x = self.third(self.second(x, graphs.edge_index), graphs.edge_index)
        of_graph = gnn.global_mean_pool(x, graphs.batch)
        return self.last(torch.cat([x, of_graph[graphs.batch]], dim=1))


def graph(generator: torch.Generator) -> Any:
    nodes = int(torch.randint(2, 7, (1,), generator=generator))
    return pyg.data.Data(
        x=torch.randn(nodes, 3, generator=generator, dtype=torch.float64),
        edge_index=torch.randint(nodes, (2, 2 * nodes), generator=generator),
        y=torch.randint(2, (nodes,), generator=generator),
    )


def graphs(rows: int, generator: torch.Generator) -> Any:
    return pyg.data.Batch.from_data_list([graph(generator) for _ in range(rows)])


def some_of(batch: Any, rows: slice) -> Any:
    if rows.start == rows.stop:
        # from_data_list cannot make one of no graphs.
        return pyg.data.Batch(ptr=torch.zeros(1, dtype=torch.long))
    return pyg.data.Batch.from_data_list(batch[rows])


# One large graph of many: its rows are the graphs, and no tensor of it has as many.
torchstrategy.register_batch_type(
    pyg.data.Batch,
    rows=lambda batch: batch.num_graphs,
    take=some_of,
    apply=lambda batch, fn: copy.copy(batch).apply(fn),
)


def over_all_nodes(model: Any, batch: Any) -> torch.Tensor:
    return compute_average_loss(
        F.cross_entropy(model(batch), batch.y, reduction="none")
    )


def over_nodes(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch), batch.y)


# ---- all of them train

FAMILIES = {
    "gpt2": Family(gpt2, with_tokens, **of_tokens(next_tokens)),
    "bert": Family(bert, with_classes, own_loss),
    # It has norms in float32.
    "t5": Family(t5, with_tokens, **of_tokens(translated_tokens), tolerance=2e-6),
    "vit": Family(vit, with_labels, own_loss),
    "resnet": Family(resnet, with_labels, own_loss),
    # Its loss is computed in float32.
    "wav2vec2": Family(wav2vec2, speech, own_loss, tolerance=2e-6),
    "clip": Family(clip, captioned, contrasted, contrasted_by_the_package),
    "graph_network": Family(GraphNetwork, graphs, over_all_nodes, over_nodes),
}


class Training:
    """A model, the optimizer and its schedule, in a strategy or in none."""

    def __init__(self, family: Family, strategy: torchstrategy.Strategy | None) -> None:
        self.strategy = strategy
        self.loss = family.loss if strategy else family.plain_loss or family.loss
        self.model: Any = family.made()
        if strategy:
            SyncBatchNorm.convert_sync_batchnorm(strategy.distribute_module(self.model))
        self.begin()

    def begin(self) -> None:
        self.optimizer = sgd(self.model)
        if self.strategy:
            self.strategy.distribute_optimizer(self.optimizer)
        self.schedule = transformers.get_cosine_schedule_with_warmup(
            self.optimizer, 0, 6
        )

    def backward(self, batch: Any) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.model, batch)
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.schedule.step()

    def step(self, batch: Any) -> torch.Tensor:
        loss = self.backward(batch)
        self.update()
        return loss


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().cpu().clone() for name, tensor in named.items()}


def assert_trained_alike(
    ours: Training, plain: Training, tolerance: float, case: str
) -> None:
    assert_close(
        gradients(ours.model),
        gradients(plain.model),
        f"{case}, gradient",
        tolerance,
        tolerance * 1e-2,
    )
    assert_close(
        tensors_of(ours.model),
        tensors_of(plain.model),
        case,
        tolerance,
        tolerance * 1e-2,
    )


def train(
    family: Family,
    strategy: torchstrategy.Strategy,
    *,
    inside: bool = True,
    between: Callable[[Training, int], None] | None = None,
) -> tuple[Training, Training]:
    """Takes three steps both ways.

    Compares all parameters, gradients and buffers after each.
    """
    ours, plain = Training(family, strategy), Training(family, None)
    for k, batch in enumerate(family.batches()):
        for training in (ours, plain) if between else ():
            between(training, k)
        plain.step(batch)
        if inside:
            strategy.run(ours.step, args=(deal(strategy, batch),))
        else:
            strategy.run(ours.backward, args=(deal(strategy, batch),))
            ours.update()
        assert_trained_alike(ours, plain, family.tolerance, f"step {k}")
    return ours, plain


# An update after the run has nothing more to say to devices, each of which takes its
# time.
WAYS = (
    {"inside": central_with_copies}
    if SIMULATED
    else {"inside": central_with_copies, "outside": central}
)


@for_releases
@pytest.mark.parametrize("where", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_in_replicas_as_in_plain_torch(name: str, where: str) -> None:
    train(FAMILIES[name], WAYS[where](3), inside=where == "inside")


# ---- what else people do with them


def started(name: str) -> tuple[torchstrategy.Strategy, Any, Any]:
    """A model of a strategy that has trained a step, and one like it."""
    strategy = central_with_copies(3)
    ours, plain = Training(FAMILIES[name], strategy), Training(FAMILIES[name], None)
    batch = FAMILIES[name].batches()[0]
    strategy.run(ours.step, args=(deal(strategy, batch),))
    plain.step(batch)
    return strategy, ours.model.eval(), plain.model.eval()


def beside(model: nn.Module, batch: Any) -> Any:
    """A batch where the model is."""
    device = next(model.parameters()).device
    return {name: tensor.to(device) for name, tensor in batch.items()}


def assert_same_rows(
    strategy: torchstrategy.Strategy, actual: Any, expected: torch.Tensor
) -> None:
    """What replicas have computed of their rows is what was computed of all rows."""
    torch.testing.assert_close(
        strategy.gather(actual, axis=0).cpu(), expected, rtol=1e-6, atol=1e-6
    )


@for_changes
@pytest.mark.parametrize(("name", "is_reentrant"), [("gpt2", False), ("vit", True)])
def test_layers_may_be_recomputed_from_some_step_on(
    name: str, is_reentrant: bool
) -> None:
    forwards: dict[Training, list[int]] = {}

    def recompute(training: Training, k: int) -> None:
        model = training.model
        if k == 0:
            calls = forwards.setdefault(training, [])
            layer = next(
                part for part in model.modules() if isinstance(part, nn.LayerNorm)
            )
            layer.register_forward_hook(
                lambda module, args, out: calls.append(len(out))
            )
        if k == 1:
            # It has a new name; Python 3.10 is left with an older version, which does
            # not know it.
            enable = (
                getattr(model, "activation_checkpointing_enable", None)
                or model.gradient_checkpointing_enable
            )
            enable({"use_reentrant": is_reentrant})

    ours, plain = train(FAMILIES[name], central_with_copies(3), between=recompute)
    assert forwards[plain] == [6, 7, 7, 2, 2]
    if IN_TURNS:
        # All items, in the order of the turns.
        expected = [2, 2, 2, 3, 3, 1, 3, 3, 1, 1, 1, 1, 1]
        assert sorted(forwards[ours]) == sorted(expected)
        return
    # The list has an item where plain PyTorch appends one, with what each replica
    # appended.
    of_replicas = [
        rows.values if isinstance(rows, torchstrategy.PerReplica) else rows
        for rows in forwards[ours]
    ]
    assert of_replicas == [2, (3, 3, 1), (3, 3, 1), 1, 1]


@for_changes
def test_a_part_may_be_frozen_between_steps() -> None:
    def freeze(training: Training, k: int) -> None:
        if k == 1:
            training.model.freeze_feature_encoder()

    ours, _ = train(FAMILIES["wav2vec2"], central_with_copies(3), between=freeze)
    assert not any(
        p.requires_grad for p in ours.model.wav2vec2.feature_extractor.parameters()
    )


def test_tied_embeddings_may_become_larger_between_steps() -> None:
    def enlarge(training: Training, k: int) -> None:
        if k == 1:
            embeddings = training.model.resize_token_embeddings(
                WORDS + 4, mean_resizing=False
            )
            with torch.no_grad():
                embeddings.weight[WORDS:] = 0.1
            training.begin()

    ours, _ = train(FAMILIES["gpt2"], central_with_copies(3), between=enlarge)
    assert ours.model.lm_head.weight is ours.model.transformer.wte.weight
    assert ours.model.lm_head.weight.shape == (WORDS + 4, 8)


def test_a_models_own_loss_over_a_number_of_tokens_is_exact_if_summed() -> None:
    def step(training: Training, batch: Any, tokens: int) -> None:
        training.optimizer.zero_grad()
        training.model(**batch, num_items_in_batch=tokens).loss.backward()
        training.update()

    strategy, options = central(3), torchstrategy.RunOptions(gradient_reduction="sum")
    family = FAMILIES["gpt2"]
    ours, plain = Training(family, strategy), Training(family, None)
    for k, batch in enumerate(family.batches()):
        tokens = int((batch["labels"][:, 1:] != IGNORED).sum())
        strategy.run(step, args=(ours, deal(strategy, batch), tokens), options=options)
        step(plain, batch, tokens)
        # Its loss is computed in float32.
        assert_trained_alike(ours, plain, 2e-6, f"step {k}")


def test_what_a_model_returns_keeps_its_type() -> None:
    strategy, ours, plain = started("bert")
    batch = {
        name: tensor
        for name, tensor in FAMILIES["bert"].batches()[1].items()
        if name != "labels"
    }
    expected = plain(**batch, output_hidden_states=True)
    actual = strategy.run(
        lambda b: ours(**b, output_hidden_states=True), args=(deal(strategy, batch),)
    )
    assert type(actual) is type(expected) and list(actual) == list(expected)
    assert_same_rows(strategy, actual.logits, expected.logits)
    for layer, wanted in zip(
        actual["hidden_states"], expected["hidden_states"], strict=True
    ):
        assert_same_rows(strategy, layer, wanted)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_hidden_states_are_there_in_every_replica_and_outside(name: str) -> None:
    """A model puts hooks on its layers when they are asked for first.

    That is in replicas here, of which one is absent.
    """
    strategy, ours, plain = started(name)
    hidden = "encoder_hidden_states" if name == "t5" else "hidden_states"
    first, _, last = FAMILIES[name].batches()
    for batch in (last, first):
        expected = plain(**batch, output_hidden_states=True)[hidden]
        results = strategy.run(
            lambda b: ours(**b, output_hidden_states=True)[hidden],
            args=(deal(strategy, batch),),
        )
        assert len(results) == 3
        assert_same_rows(strategy, results[1], expected[1])
    assert len(ours(**beside(ours, batch), output_hidden_states=True)[hidden]) == 3


@for_changes
@pytest.mark.parametrize(("name", "beams"), [("gpt2", 1), ("gpt2", 3), ("t5", 1)])
def test_replicas_generate_what_one_device_generates(name: str, beams: int) -> None:
    strategy, ours, plain = started(name)
    inputs = sentences(7, torch.Generator().manual_seed(5))
    if name == "gpt2":
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    options = {
        "max_new_tokens": 4,
        "min_new_tokens": 4,
        "num_beams": beams,
        "do_sample": False,
    }
    results = strategy.run(
        lambda batch: ours.generate(**batch, **options), args=(deal(strategy, inputs),)
    )
    assert torch.equal(
        strategy.gather(results, axis=0).cpu(), plain.generate(**inputs, **options)
    )


@for_changes
def test_what_is_written_on_a_configuration_holds_in_every_replica() -> None:
    strategy, ours, plain = started("gpt2")
    inputs = FAMILIES["gpt2"].batches()[1]
    prompts = {
        "input_ids": inputs["input_ids"],
        "attention_mask": torch.ones_like(inputs["input_ids"]),
    }
    for length in (2, 3):
        for model in (ours, plain):
            model.generation_config.max_new_tokens = (
                model.generation_config.min_new_tokens
            ) = length
        results = strategy.run(
            lambda b: ours.generate(**b, do_sample=False),
            args=(deal(strategy, prompts),),
        )
        assert torch.equal(
            strategy.gather(results, axis=0).cpu(),
            plain.generate(**prompts, do_sample=False),
        )
    for is_used in (True, False):
        ours.config.use_cache = is_used
        assert (
            strategy.run(
                lambda b: "past_key_values" in ours(**b),
                args=(deal(strategy, prompts),),
            )
            is is_used
        )
    ours.set_attn_implementation("eager")
    results = strategy.run(
        lambda b: ours(**b, output_attentions=True).attentions,
        args=(deal(strategy, prompts),),
    )
    plain.set_attn_implementation("eager")
    assert_same_rows(
        strategy, results[0], plain(**prompts, output_attentions=True).attentions[0]
    )


# In the scope of a strategy on devices, from_pretrained wants a package more:
# accelerate.
@for_changes
@pytest.mark.parametrize(
    "way", ["distributed"] if SIMULATED else ["distributed", "made_in_the_scope"]
)
def test_a_model_may_come_from_a_folder_and_go_to_one(way: str, tmp_path: Path) -> None:
    strategy, family = central_with_copies(3), FAMILIES["gpt2"]
    plain = Training(family, None)
    plain.model.save_pretrained(tmp_path / "first")
    load = transformers.AutoModelForCausalLM.from_pretrained
    if way == "distributed":
        model = strategy.distribute_module(load(tmp_path / "first"))
        optimizer = strategy.distribute_optimizer(sgd(model))
    else:
        with strategy.scope():
            model = load(tmp_path / "first")
            optimizer = sgd(model)
    model.train()

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        family.loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    batch = family.batches()[0]
    strategy.run(step, args=(deal(strategy, batch),))
    plain.step(batch)
    model.save_pretrained(tmp_path / "second")
    loaded = load(tmp_path / "second")
    assert type(loaded) is type(plain.model) and loaded.config.architectures == [
        "GPT2LMHeadModel"
    ]
    assert_close(
        tensors_of(loaded), tensors_of(plain.model), "what was saved", 1e-10, 1e-10
    )


def test_a_tokenizers_batches_are_dealt_out_as_a_loader_collates_them() -> None:
    words = {word: k for k, word in enumerate(["[PAD]", "[UNK]", "a", "b", "c"])}
    pieces = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token="[PAD]"
    )
    texts = ["a", "b c", "c c c", "a b", "b", "c a c a", "a a"]
    rows = [{**tokenizer(text), "label": len(text) % 3} for text in texts]
    loader = DataLoader(
        rows, batch_size=4, collate_fn=transformers.DataCollatorWithPadding(tokenizer)
    )
    strategy = central_with_copies(3)
    ours, plain = Training(FAMILIES["bert"], strategy), Training(FAMILIES["bert"], None)
    for whole, batch in zip(
        loader, strategy.experimental_distribute_dataset(loader), strict=True
    ):
        strategy.run(ours.step, args=(batch,))
        plain.step(whole)
        assert_trained_alike(ours, plain, 1e-10, "a tokenizer's batch")


@for_changes
def test_graphs_in_a_list_are_dealt_out_and_put_together_in_the_step() -> None:
    """What torch_geometric's own DataParallel wants of a loader."""

    def step(training: Training, several: Any) -> None:
        device = next(training.model.parameters()).device
        training.step(pyg.data.Batch.from_data_list(several).to(device))

    generator = torch.Generator().manual_seed(0)
    loader = pyg.loader.DataListLoader(
        [graph(generator) for _ in range(9)], batch_size=7
    )
    strategy = central_with_copies(3)
    ours, plain = (
        Training(FAMILIES["graph_network"], strategy),
        Training(FAMILIES["graph_network"], None),
    )
    for whole, batch in zip(
        loader, strategy.experimental_distribute_dataset(loader), strict=True
    ):
        strategy.run(step, args=(ours, batch))
        step(plain, whole)
        assert_trained_alike(ours, plain, 1e-10, "graphs")


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_data_parallel_returns_what_the_model_returns(name: str) -> None:
    devices, family = compute_devices(3), FAMILIES[name]
    plain = family.made()
    model = torchstrategy.DataParallel(family.made().to(devices[0]), devices)
    for batch in family.batches():
        inputs = {key: tensor for key, tensor in batch.items() if key != "labels"}
        if name == "t5":
            inputs["decoder_input_ids"] = inputs["input_ids"]
        actual, expected = model(**beside(model, inputs)), plain(**inputs)
        assert type(actual) is type(expected)
        torch.testing.assert_close(
            actual.logits.cpu(), expected.logits, rtol=1e-6, atol=1e-6
        )
