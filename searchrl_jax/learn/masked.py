"""Mean, standard deviation and whitening over the True entries of a mask.

NumPy and JAX arrays alike: each function works in the namespace of `x`.
Values outside the mask may be anything, NaN and infinity included.
"""


def mean(x, mask, axis=None):
  """Mean of x where mask; 0 where the mask is empty.

  Args:
    x: float array of any shape.
    mask: bool array that broadcasts against x.
    axis: reduced axes; None reduces all.
  """
  xp = x.__array_namespace__()
  mask = xp.broadcast_to(mask, x.shape)
  n = xp.sum(mask.astype(x.dtype), axis=axis)
  total = xp.sum(xp.where(mask, x, 0.0), axis=axis)
  return total / xp.maximum(n, xp.ones_like(n))


def std(x, mask, axis=None, ddof: int = 0):
  """Standard deviation of x where mask; 0 where n <= ddof.

  ddof=0 divides by n (biased), ddof=1 by n - 1 (unbiased variance).
  """
  xp = x.__array_namespace__()
  mask = xp.broadcast_to(mask, x.shape)
  centre = mean(x, mask, axis)
  if axis is not None:
    centre = xp.expand_dims(centre, axis)
  square = xp.where(mask, xp.where(mask, x, 0.0) - centre, 0.0) ** 2
  n = xp.sum(mask.astype(x.dtype), axis=axis) - float(ddof)
  var = xp.sum(square, axis=axis) / xp.maximum(n, xp.ones_like(n))
  var = xp.where(n > 0, var, xp.zeros_like(var))
  # sqrt has an infinite slope at 0; the inner `where` keeps gradients finite.
  positive = var > 0
  root = xp.sqrt(xp.where(positive, var, xp.ones_like(var)))
  return xp.where(positive, root, xp.zeros_like(var))


def whiten(x, mask, eps: float, ddof: int = 0):
  """(x - mean) / (std + eps) over the whole mask; 0 outside it."""
  xp = x.__array_namespace__()
  out = (xp.where(mask, x, 0.0) - mean(x, mask)) / (
    std(x, mask, ddof=ddof) + eps
  )
  return xp.where(mask, out, xp.zeros_like(out))
