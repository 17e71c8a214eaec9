"""The packages, of which pyproject.toml cannot say that three lie in folders of other names: the configs."""

from setuptools import find_packages, setup

# In a checkout configs/ lies beside the package, where people look for it; installed it lies inside.
CONFIGS = {
    "fedjax_ssl.configs": "configs",
    "fedjax_ssl.configs.sweeps": "configs/sweeps",
    "fedjax_ssl.configs.flower": "configs/flower",  # a project of Flower, without code
}

setup(
    packages=[*find_packages(include=["fedjax_ssl*"]), *CONFIGS],
    package_dir=CONFIGS,
    package_data={
        "fedjax_ssl": ["py.typed"],
        "fedjax_ssl.report": ["*.jinja"],
        "fedjax_ssl.configs.flower": ["pyproject.toml"],
    },
)
