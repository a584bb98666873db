"""Parse the conda recipe with rattler-build, and render it for each Python, without a build: `make conda-lint`."""

import sys
from pathlib import Path

from rattler_build import Stage0Recipe, VariantConfig  # type: ignore[import-not-found] # in an environment of its own

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
VARIANTS = f"""
python: [{", ".join(f'"{each}.*"' for each in PYTHONS)}]
cxx_compiler: [gxx]
c_stdlib: [sysroot]
c_stdlib_version: ["2.17"]
"""

if __name__ == "__main__":
    recipe = Stage0Recipe.from_file(str(Path(__file__).with_name("recipe.yaml")))
    rendered = recipe.render(VariantConfig.from_yaml(VARIANTS))
    for python, each in zip(PYTHONS, rendered, strict=True):
        package = each.recipe.package
        sys.stdout.write(f"{package.name} {package.version}, Python {python}: read and rendered\n")
