"""FlopCounterMode counts our operators as it counts the products of their twins in plain PyTorch."""

import itertools

import pytest
import torch
from small_models import TINY
from torch.utils.flop_counter import FlopCounterMode

import fastbert.flops
from fastbert import BertForMaskedLM, BertForSequenceClassification, ops
from fastbert.ops.encoder_layer import DOWN, OUT, UP

LENGTHS, HEADS, WIDTH, WIDE = (6, 6, 6), 2, 8, 12
ENDS = torch.tensor([0, 6, 12, 18], dtype=torch.int32)
TOKENS = sum(LENGTHS)
SCORES = 2 * sum(length**2 for length in LENGTHS) * WIDTH  # one product of all queries with all keys


def counted(function, *inputs):
    """The FLOPs of a forward, and those of its backward."""
    with FlopCounterMode(display=False) as forward:
        y = function(*inputs)
    with FlopCounterMode(display=False) as backward:
        if y.requires_grad:
            y.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def tensor(*shape):
    return torch.randn(*shape, requires_grad=True)


def layer_parameters(projections):
    weights = [(3 // projections * WIDTH, WIDTH)] * projections + [(WIDTH, WIDTH), (WIDTH,), (WIDE, WIDTH)]
    weights += [(WIDTH, WIDE), (WIDTH,)]
    return [tensor(*shape) for weight in weights for shape in (weight, weight[:1])]


LABELS = torch.arange(TOKENS) % 9
CALLS = {
    "linear": (ops.linear, torch.nn.functional.linear, (tensor(TOKENS, 8), tensor(5, 8), tensor(5))),
    "dense_gelu": (ops.dense_gelu, ops.dense_gelu_ref, (tensor(TOKENS, 8), tensor(5, 8), tensor(5))),
    "cross_entropy": (
        lambda *x: ops.cross_entropy(*x, LABELS),
        lambda *x: ops.cross_entropy_ref(*x, LABELS),
        (tensor(TOKENS, 8), tensor(9, 8), tensor(9)),
    ),
    "bias_gelu": (ops.bias_gelu, ops.bias_gelu_ref, (tensor(TOKENS, 8), tensor(8))),
}


@pytest.mark.parametrize("needed", list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("name", CALLS)
def test_products_are_counted_as_pytorch_s(name, needed):
    ours, theirs, inputs = CALLS[name]
    inputs = [x.detach().requires_grad_(need) for x, need in zip(inputs, (*needed, needed[1]), strict=False)]
    assert counted(ours, *inputs) == counted(theirs, *inputs)


def test_attention_is_counted_by_its_lengths():
    ragged = torch.tensor([0, 2, 9, 18], dtype=torch.int32)
    pairs = 2**2 + 7**2 + 9**2
    qkv = tensor(TOKENS, 3, HEADS, WIDTH // HEADS)
    one = 2 * pairs * WIDTH
    assert counted(lambda x: ops.attention(x, ragged, 9), qkv) == (2 * one, 5 * one)
    with torch.device("meta"):  # whose lengths nobody knows
        unknown = torch.empty_like(qkv, device="meta"), torch.empty(4, dtype=torch.int32, device="meta")
        assert counted(lambda *x: ops.attention(*x, 9), *unknown) == (4 * 3 * 9**2 * WIDTH, 0)


@pytest.mark.parametrize("tables", [(True, True), (True, False)])
def test_relative_positions_are_products_with_their_tables(tables):
    qkv, slots = tensor(TOKENS, 3, HEADS, WIDTH // HEADS), torch.arange(2 * 6 - 1, dtype=torch.int32).clamp(max=6)
    keys, queries = (tensor(7, HEADS, WIDTH // HEADS) if there else None for there in tables)
    table = 2 * TOKENS * 7 * WIDTH * sum(tables)
    found = counted(lambda x: ops.relative_attention(x, ENDS, 6, ops.RelativePositions(slots, keys, queries)), qkv)
    assert found == (2 * SCORES + table, 5 * SCORES + 3 * table)


def test_a_largest_logit_comes_from_one_row():
    x, weight = tensor(TOKENS, WIDTH), tensor(9, WIDTH)
    found = counted(lambda *given: ops.linear_max(*given, None, ENDS), x, weight)
    assert found == (2 * TOKENS * WIDTH * 9, 2 * 2 * len(LENGTHS) * 9 * WIDTH)


@pytest.mark.parametrize("projections", [1, 3])
@pytest.mark.parametrize("first", ["hidden", 0, OUT, OUT + 2, UP, UP + 1, DOWN, DOWN + 1, DOWN + 2, None])
def test_a_layer_is_counted_down_to_the_first_part_that_is_trained(projections, first):
    """As autograd differentiates its twin; beside that, attention computes its weights again."""
    parameters = layer_parameters(projections)
    hidden = tensor(TOKENS, WIDTH).requires_grad_(first == "hidden")
    places = range(len(parameters))
    start = {"hidden": 0, None: len(parameters)}[first] if first in ("hidden", None) else places[first]
    for place in places:
        parameters[place].requires_grad_(place >= start)
    of_layer = lambda op: lambda x: op(x, parameters, HEADS, ENDS, 6)  # noqa: E731
    expected = counted(of_layer(ops.encoder_layer_ref), hidden)
    found = counted(of_layer(ops.encoder_layer), hidden)
    again = SCORES if hidden.requires_grad or any(x.requires_grad for x in parameters[:OUT]) else 0
    assert found == (expected[0], expected[1] + again)


@pytest.mark.parametrize("needed", [(True, True), (False, True), (True, False)])
def test_the_rest_of_a_layer(needed):
    context, hidden = (tensor(TOKENS, WIDTH).requires_grad_(need) for need in needed)
    parameters = layer_parameters(1)[OUT:]
    assert counted(lambda *x: ops.after_attention(*x, parameters), context, hidden) == counted(
        lambda *x: ops.after_attention_ref(*x, parameters), context, hidden
    )


def test_a_training_step_and_a_prepared_model():
    """Of a whole model, as of transformers' with eager attention."""
    config = TINY.changed(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=16)
    ids, inner = torch.randint(5, config.vocab_size, (3, 6)), config.hidden_size
    model, score = BertForMaskedLM(config).train(), 2 * 3 * 6**2 * inner
    dense = 2 * 18 * (4 * inner * inner + 2 * inner * config.intermediate_size)
    layers = config.num_hidden_layers * (dense + 2 * score)
    head = 2 * 18 * (inner * inner + inner * config.vocab_size)
    forward, backward = counted(lambda x: model(x, labels=x).loss, ids)
    assert forward == layers + head
    assert backward == 2 * (layers + head) + config.num_hidden_layers * score
    classifier = BertForSequenceClassification(config.changed(num_labels=2)).eval()
    of_head = 2 * 3 * (inner * inner + inner * 2)
    for each in (classifier, fastbert.prepare(classifier, "fp32")):
        with torch.no_grad():
            assert counted(lambda x, each=each: each(x).logits, ids) == (layers + of_head, 0)
