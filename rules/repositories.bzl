"""The functions of `extensions.bzl` for WORKSPACE."""

load("//rules/private/repositories:declarations.bzl", "declare_dependencies", "declare_development_dependencies", "declare_kernels")
load("//rules/private/repositories:kernels.bzl", "manifest_options")

def neuron_kernelgen_dependencies():
    """Declares the Python environment of the build steps and the Neuron compiler found on this machine."""
    declare_dependencies()

# buildifier: disable=unnamed-macro
def neuron_kernelgen_register_toolchains():
    """Registers the compilers; `--@neuron_kernelgen//rules:compiler` chooses among them."""
    native.register_toolchains(
        "@neuron_sdk//:all",
        "@neuron_kernelgen//rules/toolchain:all",
    )

def neuron_kernels(
        name = "neuron_kernels",
        manifest = [],
        targets = [],
        compiler = "",
        memory_per_compile = "",
        kernels = [],
        data = []):
    """Declares the repository of kernel targets. CMake's `add_neuron_kernels()` has the same arguments.

    Args:
        name: the repository's name.
        manifest: labels of the YAML files.
        targets: the targets to build; all targets of the manifests by default.
        compiler: overrides the flag //rules:compiler for these manifests.
        memory_per_compile: the memory to reserve for one compile, such as 8G or 6144M.
        kernels: the labels of your own folders of emitters. Each folder is a package.
        data: the labels of files that the emitters of `kernels` read.
    """
    options = manifest_options(targets, memory_per_compile, compiler)
    declare_kernels(
        name = name,
        data = {_canonical(library): [_canonical(label) for label in data] for library in kernels},
        libraries = kernels,
        manifests = manifest,
        options = {_canonical(file): options for file in manifest},
    )

def _canonical(label):
    # A label without a repository belongs to the caller's WORKSPACE, not to this file's.
    return str(Label("@" + label if label.startswith("//") else label))

def neuron_kernelgen_development_dependencies():
    """Declares the repositories for this project's own tests and linters."""
    declare_development_dependencies()
