"""GELU and its derivative, computed as in csrc/gelu.h, whose head comment derives the form and the fit.

gelu(v) = max(v, 0) - a tail(a) with a = |v|, where tail is 1 - Phi or its tanh approximation. In this form nothing
cancels for v < 0, both infinities give the right limits, and NaN stays NaN.
"""

import triton
import triton.language as tl


@triton.jit
def _gaussian(a):
    """exp(-a^2 / 2), corrected for both rounding errors of the exponent: of the square and of the conversion to base 2.

    On a GPU, tl.exp is exp2 of a rounded product: at exp(-72) that alone costs 22 units in the last place.
    """
    half = -0.5 * a
    exponent = half * a
    of_two = exponent * 1.4426950216293335  # log2(e) in float32, too small by a relative 1.33e-8
    rest = tl.fma(exponent, 1.3349767e-8, tl.fma(half, a, -exponent))
    rest = tl.fma(tl.fma(exponent, 1.4426950216293335, -of_two), 0.6931471805599453, rest)
    density = tl.exp2(of_two)
    return tl.fma(density, rest, density)


@triton.jit
def _tail(a, TANH: tl.constexpr):
    """tail(a) and -tail'(a) for a in [0, 14.5]."""
    if TANH:
        cubic = 0.044715 * a * a
        w = tl.exp(-1.5957691216057308 * a * (cubic + 1.0))  # 2 sqrt(2 / pi)
        tail = w / (1.0 + w)
        slope = 1.5957691216057308 * (cubic * 3.0 + 1.0) * tail * (1.0 - tail)
    else:
        density = _gaussian(a)
        p = (((4.07761316e-3 * a + 4.03725745e-2) * a + 1.82461889e-1) * a + 4.37250984e-1) * a + 0.5
        q = (((1.02209317e-2 * a + 1.01205847e-1) * a + 4.67429256e-1) * a + 1.19929097) * a + 1.67238693
        tail = density * (p / (q * a + 1.0))
        slope = density * 0.3989422804014327
    return tail, slope


@triton.jit
def _short_tail(a):
    r = ((-7.48657158e-7 * a + 3.34116594e-5) * a - 6.40464947e-4) * a + 7.01594772e-3
    return tl.exp2((((r * a - 4.99956049e-2) * a - 4.63506490e-1) * a - 1.14883220) * a - 1.00018799)


@triton.jit
def _short_ratio(a):
    r = ((-3.97982012e-6 * a + 1.50111184e-4) * a - 2.35331943e-3) * a + 2.01878510e-2
    return (((r * a - 1.05792895e-1) * a - 6.40900731e-1) * a - 7.96450794e-1) * a + 9.99929786e-1


@triton.jit
def _magnitude(v):
    a = tl.abs(v)
    return tl.where(a > 14.5, 14.5, a)  # both tails are 0 from there on; NaN stays NaN


@triton.jit
def is_short(x):
    """Whether the elements that x points to have 16 bits."""
    return x.dtype.element_ty.primitive_bitwidth == 16


@triton.jit
def gelu(v, TANH: tl.constexpr, SHORT: tl.constexpr):
    """SHORT: the result will be rounded to 16 bits."""
    a = _magnitude(v)
    if SHORT and not TANH:
        tail = _short_tail(a)
    else:
        tail, _ = _tail(a, TANH)
    return tl.where(v < 0.0, 0.0, v) - a * tail


@triton.jit
def gelu_derivative(v, TANH: tl.constexpr, SHORT: tl.constexpr):
    a = _magnitude(v)
    if SHORT and not TANH:
        d = _short_tail(a) * _short_ratio(a)
    else:
        tail, slope = _tail(a, TANH)
        d = tail - a * slope
    return tl.where(v > 0.0, 1.0 - d, d)
