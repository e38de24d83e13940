"""From blocks to arrays on a mesh; meshes of several devices are in test_wire_weight_host."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from weights_cases import PARAMS

from estr_jax.weights.placement import placed, wanted_by


def test_blocks_become_arrays_in_the_type_that_is_asked_for():
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=one), PARAMS)
  blocks = {region: leaf for region, leaf in zip(wanted_by(abstract), jax.tree.leaves(PARAMS), strict=True)}
  params = placed(abstract, blocks)
  assert not blocks
  jax.tree.map(lambda got, sent: np.testing.assert_array_equal(got, sent.astype(ml_dtypes.bfloat16)), params, PARAMS)
