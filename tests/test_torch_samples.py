"""lossguard gives the numbers of torch.nn on torch's own test samples.

The samples are those PyTorch tests itself with: OpInfo for the functions (values, first and second
derivatives) and ModuleInfo for the modules (values, gradients, references in plain Python, state,
and the errors for arguments that do not fit together). Halves are held to native in float64, not
to native halves: lossguard accumulates in float32 and rounds once, and is the more accurate one.
"""

import copy
import inspect
import pickle
import random
from functools import partial

import lossguard
import lossguard.functional as LF
import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import ModuleErrorEnum, module_db
from torch.testing._internal.common_utils import noncontiguous_like

FUNCTIONS = ("binary_cross_entropy", "binary_cross_entropy_with_logits", "nll_loss", "cross_entropy")
CLASSES = ("BCELoss", "BCEWithLogitsLoss", "NLLLoss", "CrossEntropyLoss")
FUNCTION_OF = dict(zip(CLASSES, FUNCTIONS))
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)

OPS = {name: op for op in op_db for name in FUNCTIONS if op.name == f"nn.functional.{name}"}
MODULES = {name: info for info in module_db for name in CLASSES if info.module_cls is getattr(torch.nn, name)}

each_function = pytest.mark.parametrize("name", FUNCTIONS)
each_class = pytest.mark.parametrize("name", CLASSES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

# rtol, atol. With weights in [-9, 9] the samples sum up to a few hundred terms of both signs, and where
# those cancel only an absolute bound holds: some 1,000 units in the last place at 1 for float64; for float32
# both are the defaults of torch.testing.
EMULATED = lossguard._C.build_info().get("emulated", False)
TOLERANCE = {torch.float64: (1e-13, 1e-12), torch.float32: (1.3e-6, 1e-5)}
# A half is a float32 result rounded once: half a unit in the last place more.
TOLERANCE.update({dtype: (torch.finfo(dtype).eps / 2 + 1.3e-6, 1e-5) for dtype in HALVES})


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def one_thread():
    """The samples are tiny: more threads would spend the time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_fallback(monkeypatch):
    """Native compared with native would prove nothing."""

    def refuse(function, tensors, options, why):
        pytest.fail(f"{function.__name__} went to native: {why}")

    monkeypatch.setattr(lossguard._native, "fall_back", refuse)


# ---- samples


def leaf(value, convert=lambda t: t):
    """A tensor detached and converted, which requires a gradient if the original does; else the value."""
    if not isinstance(value, torch.Tensor):
        return value
    return convert(value.detach()).detach().requires_grad_(value.requires_grad)


def doubled(value):
    return leaf(value, lambda t: t.double() if t.is_floating_point() else t)


def op_samples(name, dtype):
    """(input, target, options) of each OpInfo sample, all leaves."""
    for sample in OPS[name].sample_inputs("cpu", dtype, requires_grad=True):
        options = {key: leaf(value) for key, value in sample.kwargs.items()}
        target, = sample.args
        if name == "cross_entropy" and target.is_floating_point() and "weight" in options:
            options["weight"].requires_grad_()  # the one weight that has a gradient
        yield leaf(sample.input), leaf(target), options


def module_samples(name, dtype):
    """Each ModuleInfo sample: (sample, constructor options, input, target)."""
    info = MODULES[name]
    for sample in info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True):
        assert not sample.constructor_input.args and not sample.forward_input.kwargs
        input, target = sample.forward_input.args
        yield sample, sample.constructor_input.kwargs, leaf(input), leaf(target)


def function_samples(name, dtype):
    """(input, target, options) for a function from OpInfo, and from ModuleInfo with its larger inputs."""
    yield from op_samples(name, dtype)
    for _, options, input, target in module_samples(CLASSES[FUNCTIONS.index(name)], dtype):
        yield input, target, {key: leaf(value) for key, value in options.items()}


def differentiable(input, target, options):
    tensors = (input, target, *options.values())
    return [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]


def loss_and_gradients(function, input, target, options, **policy):
    """The loss, and the gradients of all that requires one for an uneven grad_output."""
    loss = function(input, target, **options, **policy)
    grad = (torch.arange(loss.numel(), dtype=loss.dtype) % 7 + 1) / 4  # exact in every dtype
    return [loss, *torch.autograd.grad(loss, differentiable(input, target, options), grad.reshape(loss.shape))]


def assert_matches(actual, native, reference):
    """Shape and dtype of native, numbers of the float64 reference."""
    assert len(actual) == len(native) == len(reference) >= 2  # a loss, and gradients
    for a, n, r in zip(actual, native, reference):
        assert (a.dtype, a.shape) == (n.dtype, n.shape)
        rtol, atol = TOLERANCE[a.dtype]
        torch.testing.assert_close(a.double(), r, rtol=rtol, atol=atol, equal_nan=True)
        if a.dtype not in HALVES:
            torch.testing.assert_close(a, n, rtol=rtol, atol=atol, equal_nan=True)


def check_function(name, input, target, options, **policy):
    native = getattr(F, name)
    wide = doubled(input), doubled(target), {key: doubled(value) for key, value in options.items()}
    assert_matches(
        loss_and_gradients(getattr(LF, name), input, target, options, **policy),
        loss_and_gradients(native, input, target, options),
        loss_and_gradients(native, *wide),
    )


# ---- functions


def test_torch_has_samples_for_all_four():
    assert set(OPS) == set(FUNCTIONS) and set(MODULES) == set(CLASSES)
    for name in FUNCTIONS:
        assert set(OPS[name].supported_dtypes("cpu")) == set(OPS[name].supported_backward_dtypes("cpu")) == set(DTYPES)


@each_dtype
@each_function
def test_function(name, dtype, no_fallback):
    count = 0
    for input, target, options in op_samples(name, dtype):
        check_function(name, input, target, options)
        count += 1
    assert count >= 11


def by_position(function, names):
    return lambda input, target, *values: function(input, target, **dict(zip(names, values)))


@each_function
def test_function_derivatives(name, no_fallback):
    """First and second derivatives against finite differences, also batched over grad_output by vmap."""
    for input, target, options in op_samples(name, torch.float64):
        function = by_position(getattr(LF, name), options)
        fast = input.numel() > 30 and OPS[name].gradcheck_fast_mode is not False  # torch rules it out for BCE
        settings = dict(check_batched_grad=True, fast_mode=fast)
        assert torch.autograd.gradcheck(function, (input, target, *options.values()), **settings)
        assert torch.autograd.gradgradcheck(function, (input, target, *options.values()), **settings)


def test_no_sample_needs_the_extra_checks_off():
    """None of torch's samples has a probability outside [0, 1], so their values are tested fully checked."""
    targets = [target for name in FUNCTIONS for _, target, _ in function_samples(name, torch.float64)]
    soft = [target for target in targets if target.is_floating_point()]
    assert len(targets) > 200 and len(soft) > 80
    assert all(((target >= 0) & (target <= 1)).all() for target in soft)
    assert lossguard.policy()["strict"]


@each_dtype
@pytest.mark.parametrize("name", ["binary_cross_entropy_with_logits", "cross_entropy"])
def test_targets_outside_the_unit_interval(name, dtype, no_fallback):
    """Native computes with them silently: so does strict=False, with native's numbers. The default refuses."""
    count = 0
    for input, target, options in op_samples(name, dtype):
        if target.is_floating_point():
            target = leaf(target, lambda t: torch.where(t < 0.5, t - 1, t + 1))
            check_function(name, input, target, options, strict=False)
            with pytest.raises(lossguard.ValueOutOfRangeError) as caught:
                getattr(LF, name)(input, target, **options)
            assert caught.value.report.sections[0].count == target.numel()
            count += 1
    assert count >= 10


# ---- layouts


def permuted(t):
    """The last dimension outermost in memory."""
    order = tuple(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order)


def channels_last(t):
    """torch.channels_last and its like for any number of spatial dimensions."""
    return t.movedim(1, -1).contiguous().movedim(-1, 1) if t.dim() > 2 else t


def expanded_rows(t):
    return t[:1].expand_as(t) if t.dim() else t


def expanded_last(t):
    return t[..., :1].expand_as(t) if t.dim() else t


def offset(t):
    """Data that is aligned to its dtype and no better."""
    return t.new_empty(t.numel() + 1)[1:].view_as(t).copy_(t)


LAYOUTS = (noncontiguous_like, permuted, channels_last, expanded_rows, expanded_last, offset)


@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@each_function
def test_layout(name, layout, dtype, no_fallback):
    """Every layout of input, target and weights gives the numbers of a contiguous copy.

    The loss of one element is the same to the last bit; on CUDA, of one that is no sum over a row. A sum is taken
    in another order: both are within TOLERANCE of the truth, so within twice that of each other.
    """
    function = getattr(LF, name)
    rtol, atol = TOLERANCE[dtype]
    unusual = 0
    for input, target, options in function_samples(name, dtype):
        values = [input, target, *options.values()]
        laid_out = [leaf(value, layout) for value in values]
        usual = [leaf(value, torch.Tensor.contiguous) for value in laid_out]
        unusual += laid_out[0].stride() != usual[0].stride() or laid_out[0].data_ptr() % 16 != 0
        expected = loss_and_gradients(function, usual[0], usual[1], dict(zip(options, usual[2:])))
        for which in ((0,), (1,), range(len(values))):
            mixed = [laid_out[i] if i in which else usual[i] for i in range(len(values))]
            actual = loss_and_gradients(function, mixed[0], mixed[1], dict(zip(options, mixed[2:])))
            for i, (a, e) in enumerate(zip(actual, expected)):
                if not torch.equal(a, e):
                    a_row_of_cuda = EMULATED and name == "cross_entropy"
                    assert a_row_of_cuda or not (i == 0 and options.get("reduction") == "none")
                    torch.testing.assert_close(a, e, rtol=2 * rtol, atol=2 * atol, equal_nan=True)
    assert unusual >= 1


# ---- modules


def make_pair(name, options, **policy):
    return getattr(lossguard, name)(**options, **policy), getattr(torch.nn, name)(**options)


@each_dtype
@each_class
def test_module(name, dtype, no_fallback):
    count = 0
    for _, options, input, target in module_samples(name, dtype):
        ours, native = make_pair(name, options)
        wide = copy.deepcopy(native).double()
        assert_matches(
            loss_and_gradients(ours, input, target, {}),
            loss_and_gradients(native, input, target, {}),
            loss_and_gradients(wide, doubled(input), doubled(target), {}),
        )
        count += 1
    assert count >= 6


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")  # torch's reference
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@each_class
def test_module_reference(name, dtype, no_fallback):
    """Against torch's references, written in plain Python and in the dtype of the sample."""
    rtol, atol = TOLERANCE[dtype]
    for sample, options, input, target in module_samples(name, dtype):
        ours, native = make_pair(name, options)
        expected = sample.reference_fn(native, input, target)
        torch.testing.assert_close(ours(input, target), expected, rtol=rtol, atol=atol, equal_nan=True)


def assert_same_state(ours, native):
    assert list(ours.state_dict()) == list(native.state_dict())
    for a, b in zip(ours.state_dict().values(), native.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@each_class
def test_module_state(name, no_fallback):
    """repr and state_dict are native's; pickle, deepcopy and a native state_dict bring back the same module."""
    for input, target, options in function_samples(FUNCTION_OF[name], torch.float32):
        ours, native = make_pair(name, options, strict=False, check_finite=True, on_violation="skip", when="deferred")
        assert isinstance(ours, type(native))
        assert repr(ours) == repr(native)
        assert_same_state(ours, native)
        expected = ours(input, target)
        for twin in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
            assert type(twin) is type(ours)
            assert repr(twin) == repr(ours)
            assert (twin.strict, twin.check_finite, twin.on_violation, twin.when) == (False, True, "skip", "deferred")
            assert_same_state(twin, native)
            torch.testing.assert_close(twin(input, target), expected, rtol=0, atol=0, equal_nan=True)
        blank = {key: torch.zeros_like(v) if isinstance(v, torch.Tensor) else v for key, v in options.items()}
        restored, _ = make_pair(name, blank)
        restored.load_state_dict(native.state_dict())
        torch.testing.assert_close(restored(input, target), expected, rtol=0, atol=0, equal_nan=True)


# ---- errors


def error_cases(name, dtype):
    """(ours, native, type, regex): each ErrorModuleInput for the module and the function, each OpInfo ErrorInput."""
    info, ours, native = MODULES[name], getattr(LF, FUNCTION_OF[name]), getattr(F, FUNCTION_OF[name])
    if info.module_error_inputs_func:
        settings = dict(device="cpu", dtype=dtype, requires_grad=False, training=True)
        for sample in info.module_error_inputs_func(info, **settings):
            assert sample.error_on is ModuleErrorEnum.FORWARD_ERROR
            given = sample.module_error_input
            options, arguments = given.constructor_input.kwargs, given.forward_input.args
            for pair in (make_pair(name, options), (partial(ours, **options), partial(native, **options))):
                yield *(partial(loss, *arguments) for loss in pair), sample.error_type, sample.error_regex
    op = OPS[FUNCTION_OF[name]]
    for error in op.error_inputs("cpu") if op.error_inputs_func else ():
        sample = error.sample_input
        pair = (partial(loss, sample.input, *sample.args, **sample.kwargs) for loss in (ours, native))
        yield *pair, error.error_type, error.error_regex


@each_dtype
@pytest.mark.parametrize("name", [name for name in CLASSES if any(error_cases(name, torch.float32))])
def test_errors(name, dtype):
    """The same exception type as native, and a text that native's pattern matches."""
    count = 0
    for ours, native, error_type, error_regex in error_cases(name, dtype):
        with pytest.raises(error_type) as expected:
            native()
        with pytest.raises(error_type, match=error_regex) as caught:
            ours()
        assert caught.type is expected.type
        count += 1
    assert count >= 2


# ---- signatures


POLICY = ("strict", "check_finite", "on_violation", "when")


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(
    "ours, native",
    [(getattr(LF, name), getattr(F, name)) for name in FUNCTIONS]
    + [(getattr(lossguard, name).__init__, getattr(torch.nn, name).__init__) for name in CLASSES],
    ids=FUNCTIONS + CLASSES,
)
def test_signature(ours, native):
    """Native's, then the policy by keyword only."""
    policy = [(name, inspect.Parameter.KEYWORD_ONLY, None) for name in POLICY]
    assert parameters(ours) == parameters(native) + policy


@each_class
def test_forward_signature(name):
    assert parameters(getattr(lossguard, name).forward) == parameters(getattr(torch.nn, name).forward)
