"""The wheel ``lineargpt_ops``: the ops of ``kernels/``, without the programs, which run from a clone."""

from setuptools import find_packages, setup

setup(packages=["lineargpt_ops", *(f"lineargpt_ops.{name}" for name in find_packages("kernels"))],
      package_dir={"lineargpt_ops": "kernels"}, package_data={"lineargpt_ops.linear_attention": ["tuning.json"]})
