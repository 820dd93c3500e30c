"""The same as `extensions.bzl`, for WORKSPACE."""

load("//rules/private/repositories:kernels.bzl", "kernels_repository")
load("//rules/private/repositories:pypi_sdist.bzl", "llama_cpp")
load("//rules/private/repositories:python_env.bzl", "python_env")
load("//rules/private/repositories:sdk.bzl", "neuron_sdk")

def neuron_kernelgen_dependencies():
    """Declares the Python environment of the build steps and the Neuron compiler found on this machine."""
    python_env(name = "neuron_python", lock = Label("//:requirements.txt"), packages = ["jaxlib"])
    neuron_sdk(name = "neuron_sdk")

# buildifier: disable=unnamed-macro
def neuron_kernelgen_register_toolchains():
    """Registers the compilers; `--@neuron_kernelgen//rules:compiler` chooses among them."""
    native.register_toolchains(
        "@neuron_sdk//:all",
        "@neuron_kernelgen//rules/toolchain:all",
    )

def neuron_kernels(name = "neuron_kernels", manifests = [], kernels = [], data = {}):
    """Declares the repository of kernel targets.

    Args:
        name: the repository's name.
        manifests: labels of the YAML files.
        kernels: labels of the BUILD files of your own kernel libraries.
        data: labels of files that emitters open, by the label of their library's BUILD file.
    """
    numbers = {}
    for number, library in enumerate(kernels):
        for label in data.get(library, []):
            numbers.setdefault(label, []).append(str(number))
    unknown = [library for library in data if library not in kernels]
    if unknown:
        fail("neuron_kernels: data names {}, and kernels does not".format(", ".join(unknown)))
    kernels_repository(
        name = name,
        data = {label: " ".join(of) for label, of in numbers.items()},
        libraries = kernels + [Label("//kernels:BUILD.bazel")],
        manifests = manifests,
    )

def neuron_kernelgen_development_dependencies():
    """Declares what this project's own tests and linters need."""
    python_env(
        name = "neuron_python_dev",
        base = Label("@neuron_python//:python"),
        lock = Label("//:requirements-dev.txt"),
    )
    llama_cpp()
