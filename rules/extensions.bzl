"""Module extensions: name manifests and kernel libraries in MODULE.bazel.

    neuron = use_extension("@neuron_kernelgen//rules:extensions.bzl", "neuron")
    neuron.manifest(file = "//models:mine.yaml")
    neuron.kernels(build_file = "//my_kernels:BUILD.bazel")
    use_repo(neuron, "neuron_kernels")

`@neuron_kernels` then holds a target for every kernel of every manifest; `neuron_manifest` in `@neuron_kernels//:defs.bzl` gives a
manifest's bundles names in a package of yours. Manifests that are built now and then go into a repository of their own, which is planned
when something of it is built:

    neuron.manifest(file = "//models:other.yaml", repository = "neuron_others")
    use_repo(neuron, "neuron_kernels", "neuron_others")
"""

load("//rules/private/repositories:kernels.bzl", "kernels_repository")
load("//rules/private/repositories:pypi_sdist.bzl", "llama_cpp")
load("//rules/private/repositories:python_env.bzl", "python_env")
load("//rules/private/repositories:sdk.bzl", "neuron_sdk")

_REPOSITORY = "neuron_kernels"

_manifest = tag_class(
    doc = "Names a manifest whose kernels are to be built.",
    attrs = {
        "file": attr.label(mandatory = True, doc = "The YAML file."),
        "repository": attr.string(default = _REPOSITORY, doc = "The repository with its kernels; manifests of one share them."),
    },
)

_kernels = tag_class(
    doc = "Names a folder of emitters; it wins over this project's own kernels.",
    attrs = {
        "build_file": attr.label(mandatory = True, doc = "BUILD file of the folder; it exports the .py files."),
        "data": attr.label_list(allow_files = True, doc = "Files that its emitters open, and targets that make such files; each visible everywhere."),
    },
)

def _reproducible(mctx):
    # The repositories follow from the tags alone, so a MODULE.bazel.lock has nothing to hold of them, nor of what they read.
    return mctx.extension_metadata(reproducible = True)

def _neuron_impl(mctx):
    manifests = {_REPOSITORY: []}
    libraries = []
    data = {}
    for module in mctx.modules:
        for tag in module.tags.manifest:
            files = manifests.setdefault(tag.repository, [])
            if tag.file not in files:
                files.append(tag.file)
        for tag in module.tags.kernels:
            if tag.build_file not in libraries:
                libraries.append(tag.build_file)
            for label in tag.data:
                data.setdefault(label, []).append(str(libraries.index(tag.build_file)))
    for name, files in manifests.items():
        kernels_repository(
            name = name,
            data = {label: " ".join(numbers) for label, numbers in data.items()},
            libraries = libraries + [Label("//kernels:BUILD.bazel")],
            manifests = files,
        )
    return _reproducible(mctx)

neuron = module_extension(
    doc = "Plans the kernels of all named manifests into one repository, so that manifests share them, or into several.",
    implementation = _neuron_impl,
    tag_classes = {"manifest": _manifest, "kernels": _kernels},
)

def _toolchains_impl(mctx):
    python_env(name = "neuron_python", lock = Label("//:requirements.txt"), packages = ["jaxlib"])
    neuron_sdk(name = "neuron_sdk")
    return _reproducible(mctx)

toolchains = module_extension(
    doc = "The Python environment of the build steps and the Neuron compiler found on this machine.",
    implementation = _toolchains_impl,
)

def _development_impl(mctx):
    python_env(
        name = "neuron_python_dev",
        base = Label("@neuron_python//:python"),
        lock = Label("//:requirements-dev.txt"),
    )
    llama_cpp()
    return _reproducible(mctx)

development = module_extension(
    doc = "What this project's own tests and linters need.",
    implementation = _development_impl,
)
