"""Arguments that must be refused, with what the message says; and those that must not."""

import copy
import pickle

import pytest
import torch

from flashqla.errors import ArgumentError
from flashqla.ops import chunk_gated_delta_rule, chunk_gated_delta_rule_fwd, explain
from flashqla.ops.checks import _Lengths

B, T, HK, HV, D = 1, 65, 2, 4, 128


def arguments(**changes):
    zeros = {
        "q": torch.zeros(B, T, HK, D),
        "k": torch.zeros(B, T, HK, D),
        "v": torch.zeros(B, T, HV, D),
        "g": torch.zeros(B, T, HV),
        "beta": torch.zeros(B, T, HV),
        "initial_state": torch.zeros(1, HV, D, D),
    }
    return zeros | changes


def offsets(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def refused(entry, **changes) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        entry(**arguments(**changes))
    assert isinstance(caught.value, ArgumentError)
    return str(caught.value)


def heads(hk, hv):
    q = torch.zeros(B, T, hk, D)
    rows = torch.zeros(B, T, hv)
    return {"q": q, "k": q, "v": torch.zeros(B, T, hv, D), "g": rows, "beta": rows, "initial_state": None}


def dims(key_dim, value_dim):
    q = torch.zeros(B, T, HK, key_dim)
    return {"q": q, "k": q, "v": torch.zeros(B, T, HV, value_dim), "initial_state": None}


BATCH_OF_TWO = {name: x.expand(2, *x.shape[1:]) for name, x in arguments().items()}


@pytest.mark.parametrize("entry", [chunk_gated_delta_rule, chunk_gated_delta_rule_fwd, explain])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param(heads(8, 4), ["4 value heads do not divide over 8 key heads"], id="heads 8/4"),
        pytest.param(heads(3, 4), ["4 value heads do not divide over 3 key heads"], id="heads 3/4"),
        *(
            pytest.param(dims(k, v), [f"head_dim {k if k != D else v}", "K = V = 128"], id=f"dims {k}/{v}")
            for k, v in ((64, 128), (96, 128), (192, 128), (128, 256), (512, 512))
        ),
        pytest.param({"k": torch.zeros(B, T, HV, D)}, ["q, k and v do not fit", "k [1, 65, 4, 128]"], id="shape of k"),
        pytest.param({"q": torch.zeros(T, HK, D)}, ["q, k and v do not fit", "q [65, 2, 128]"], id="rank of q"),
        pytest.param({"v": torch.zeros(B, T - 1, HV, D)}, ["q, k and v do not fit"], id="tokens of v"),
        pytest.param({"g": torch.zeros(B, HV, T)}, ["g [1, 4, 65]", "[1, 65, 4]"], id="shape of g"),
        pytest.param({"beta": torch.zeros(B, T, HK)}, ["beta [1, 65, 2]", "[1, 65, 4]"], id="shape of beta"),
        pytest.param(
            {"cu_seqlens": offsets(0, 10, 65)},
            ["for 2 sequences", "[N, hv, K, V] = [2, 4, 128, 128]"],
            id="one state for two sequences",
        ),
        pytest.param(
            {"initial_state": torch.zeros(2, HV, D, D), "state_v_first": True}, ["[N, hv, V, K]"], id="two for one"
        ),
        pytest.param({"k": torch.zeros(B, T, HK, D).half()}, ["one floating dtype", "k [", "float16"], id="dtype of k"),
        pytest.param({"q": torch.zeros(B, T, HK, D).int()}, ["one floating dtype", "int32"], id="integers"),
        pytest.param({"g": torch.zeros(B, T, HV).double()}, ["does not go with float32 q", "float64"], id="dtype of g"),
        pytest.param({"beta": torch.ones(B, T, HV).bool()}, ["does not go with", "bool"], id="dtype of beta"),
        pytest.param({"g": torch.zeros(B, T, HV, device="meta")}, ["several devices", "on meta"], id="device of g"),
        pytest.param({"beta": None}, ["beta must be a tensor"], id="no beta"),
        pytest.param({"q": [1.0]}, ["q must be a tensor"], id="a list"),
        pytest.param({"g": torch.zeros(B, T, HV).to_sparse()}, ["g must be a dense", "sparse_coo"], id="sparse"),
        pytest.param({"q": torch.nested.nested_tensor([torch.ones(2)])}, ["q must be a dense", "nested"], id="nested"),
        pytest.param({"scale": 10**400}, ["scale is too large", "401 characters"], id="scale beyond float64"),
        pytest.param({"head_first": torch.ones(2)}, ["head_first must be False", "Tensor"], id="a tensor as a flag"),
        pytest.param({"scale": torch.ones(())}, ["scale must be a number", "scale.item()"], id="scale"),
        pytest.param({"scale": "1"}, ["scale must be a number", "scale = '1'"], id="scale in words"),
        pytest.param({"scale": 1j}, ["scale must be a number"], id="complex scale"),
        pytest.param({"scale": True}, ["scale must be a number", "scale = True"], id="a flag as scale"),
        pytest.param({"auto_cp": "no"}, ["auto_cp must be True or False", "auto_cp = 'no'"], id="a flag in words"),
        pytest.param({"state_v_first": torch.ones(1)}, ["state_v_first must be", "state_v_first [1]"], id="a flag"),
        pytest.param({"head_first": True}, ["head_first=True", "transpose(1, 2)"], id="head_first"),
        pytest.param(BATCH_OF_TWO | {"cu_seqlens": offsets(0, 9)}, ["batch 2, 1 sequences"], id="batch and offsets"),
        pytest.param({"cu_seqlens": offsets(1, 64)}, ["start at 0", "cu_seqlens[0] = 1"], id="offsets 1,64"),
        pytest.param(
            {"cu_seqlens": offsets(0, 80, 64), "initial_state": None},
            ["not decrease", "cu_seqlens[1] = 80, cu_seqlens[2] = 64"],
            id="offsets 0,80,64",
        ),
        pytest.param({"cu_seqlens": offsets(0, 66)}, ["ends at 66, past the 65 tokens", "T = 65"], id="offsets 0,T+1"),
        pytest.param({"cu_seqlens": offsets(0)}, ["N + 1 offsets"], id="no sequence"),
        pytest.param({"cu_seqlens": torch.zeros(2)}, ["N + 1 offsets", "float32"], id="floating offsets"),
        pytest.param(
            {"cu_seqlens": offsets(0, 65).to("meta")},
            ["on another device than q", "cu_seqlens on meta, q on cpu"],
            id="device of offsets",
        ),
        pytest.param({"cu_seqlens_cpu": offsets(0, 65)}, ["without cu_seqlens"], id="a hint alone"),
        pytest.param(
            {"cu_seqlens": offsets(0, 65), "cu_seqlens_cpu": offsets(0, 64)},
            ["differs", "offset 1 is 64 there, and 65 in cu_seqlens"],
            id="a wrong hint",
        ),
        pytest.param(
            {"cu_seqlens": offsets(0, 65), "cu_seqlens_cpu": offsets(0, 1, 65)},
            ["copy of cu_seqlens"],
            id="a long hint",
        ),
    ],
)
def test_refused(entry, changes, says):
    message = refused(entry, **changes)
    for words in says:
        assert words in message


@pytest.mark.parametrize("entry", [chunk_gated_delta_rule, chunk_gated_delta_rule_fwd, explain])
def test_unknown_keyword(entry):
    with pytest.raises(TypeError, match="chunk_size"):
        entry(**arguments(), chunk_size=64)


@pytest.mark.parametrize(
    ("values", "dtype"), [((0, 1, 2, 3), torch.int32), ((0, 0, 65, 65), torch.int64), ((0, 0, 0, 0), torch.int32)]
)
def test_accepted_offsets(values, dtype):
    """Also with a stride, and with rows past the last offset."""
    state = torch.ones(len(values) - 1, HV, D, D)
    given = arguments(v=torch.ones(B, T, HV, D), beta=torch.ones(B, T, HV), initial_state=state)
    strided = offsets(*values, dtype=dtype).repeat_interleave(2)[::2]
    o, final_state = chunk_gated_delta_rule(**given, cu_seqlens=strided, output_final_state=True)
    assert (o == 0).all()
    assert torch.equal(final_state, state)  # q and k are 0


def test_lengths_are_known_for_one_tensor_at_one_version():
    """Nothing that can hold other values may keep the lengths of the tensor that they were read from."""
    cu_seqlens = offsets(0, 5, 9)
    cu_seqlens._flashqla_lengths = known = _Lengths(cu_seqlens, cu_seqlens._version, (5, 4))
    assert known.of(cu_seqlens) == (5, 4)

    for other in (copy.copy(cu_seqlens), copy.deepcopy(cu_seqlens), pickle.loads(pickle.dumps(cu_seqlens))):
        kept = getattr(other, "_flashqla_lengths", None)
        assert kept is None or kept.of(other) is None
    assert known.of(cu_seqlens[:]) is None

    cu_seqlens[1] = 6
    assert known.of(cu_seqlens) is None
