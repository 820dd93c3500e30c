"""The repositories that `extensions.bzl` declares for MODULE.bazel, and `repositories.bzl` for WORKSPACE."""

load("//rules/private/repositories:kernels.bzl", "kernels_repository")
load("//rules/private/repositories:pypi_sdist.bzl", "llama_cpp")
load("//rules/private/repositories:pypi_wheel.bzl", "smollm2")
load("//rules/private/repositories:python_env.bzl", "python_env")
load("//rules/private/repositories:sdk.bzl", "neuron_sdk")

def declare_dependencies():
    """Declares the Python environment of the build steps and the Neuron compiler found on this machine."""
    python_env(name = "neuron_python", lock = Label("//:requirements.txt"), packages = ["jaxlib"])
    neuron_sdk(name = "neuron_sdk")

def declare_development_dependencies():
    """Declares the repositories for this project's own tests and linters."""
    python_env(
        name = "neuron_python_dev",
        base = Label("@neuron_python//:python"),
        lock = Label("//:requirements-dev.txt"),
    )
    llama_cpp()
    smollm2()

def declare_kernels(name, manifests, options, libraries, data, modules = {}):
    """Declares a repository of kernel targets.

    Args:
        name: the repository's name.
        manifests: labels of the YAML files.
        options: the result of `manifest_options`, by the manifest's label as a string.
        libraries: a label in the package of each of the user's folders of emitters; kernelgen's own folder comes after them.
        data: labels of the files that a library's emitters read, by the library's label, all as strings.
        modules: the repositories of other modules that call theirs by the same name, by the module's name.
    """
    kernels_repository(
        name = name,
        data = data,
        libraries = libraries + [Label("//kernels:BUILD.bazel")],
        manifests = manifests,
        modules = modules,
        options = options,
    )
