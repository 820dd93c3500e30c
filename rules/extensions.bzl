"""Module extensions: name manifests and kernel libraries in MODULE.bazel.

    neuron = use_extension("@neuron_kernelgen//rules:extensions.bzl", "neuron")
    neuron.kernels(
        kernels = ["//my_kernels"],
        manifest = ["//models:mine.yaml"],
        targets = ["trn1"],
    )
    use_repo(neuron, "neuron_kernels")

CMake's `add_neuron_kernels()` has the same arguments. `@neuron_kernels` then holds a target for every kernel of every manifest.
`neuron_manifest` in `@neuron_kernels//:defs.bzl` names a manifest's bundles in your own package. Manifests, folders of emitters and
their names are each module's own: nothing of one module is seen in another's kernels. Put manifests that you build rarely
into a repository of their own: Bazel plans it only when it builds a target of it.

    neuron.kernels(
        name = "neuron_others",
        manifest = ["//models:other.yaml"],
    )
    use_repo(neuron, "neuron_kernels", "neuron_others")
"""

load("//rules/private/repositories:declarations.bzl", "declare_dependencies", "declare_development_dependencies", "declare_kernels")
load("//rules/private/repositories:kernels.bzl", "manifest_options")
load("//rules/private/rules:compiler_flag.bzl", "CHOICES")

_REPOSITORY = "neuron_kernels"

_kernels = tag_class(
    doc = "Declares the kernels of manifests. The attributes are the arguments of CMake's add_neuron_kernels().",
    attrs = {
        "compiler": attr.string(values = [""] + CHOICES, doc = "Overrides the flag //rules:compiler for these manifests."),
        "data": attr.label_list(allow_files = True, doc = "Files that the emitters of `kernels` read, and targets that generate such files. They must be public."),
        "kernels": attr.label_list(doc = "Your own folders of emitters: packages that export their .py files. They override kernelgen's emitters."),
        "manifest": attr.label_list(allow_files = [".yaml", ".yml"], doc = "The YAML files."),
        "memory_per_compile": attr.string(doc = "The memory to reserve for one compile, such as 8G or 6144M. The default is in the manifest or in the table of targets."),
        "name": attr.string(default = _REPOSITORY, doc = "The repository of the kernels. Manifests in one repository share kernels and the folders in `kernels`."),
        "targets": attr.string_list(doc = "The targets to build; all targets of the manifests by default."),
    },
)

def _reproducible(mctx):
    # The repositories depend only on the tags, so MODULE.bazel.lock needs no entry for them or for the files that they read.
    return mctx.extension_metadata(reproducible = True)

def _neuron_impl(mctx):
    # By the repository's name, then by the module's.
    declared = {}
    for module in mctx.modules:
        for name, arguments in _declared(module).items():
            declared.setdefault(name, {})[module.name] = arguments
    declared.setdefault(_REPOSITORY, {"": struct(data = {}, libraries = [], manifests = [], options = {})})
    for name, modules in declared.items():
        # The first module, which is the root if it declares this name, has the labels of this name. The macro `neuron_manifest` gives
        # each other module the targets of its own repository.
        own, others = modules.keys()[0], modules.keys()[1:]
        repositories = {other: "{}.{}".format(name, other) for other in others}
        for module, arguments in modules.items():
            declare_kernels(
                name = repositories.get(module, name),
                data = arguments.data,
                libraries = arguments.libraries,
                manifests = arguments.manifests,
                modules = repositories if module == own else {},
                options = arguments.options,
            )
    return _reproducible(mctx)

def _declared(module):
    """Returns what a module's tags declare, as arguments of `declare_kernels` by the repository's name."""
    manifests = {}
    options = {}
    libraries = {}
    data = {}
    for tag in module.tags.kernels:
        of_tag = manifest_options(tag.targets, tag.memory_per_compile, tag.compiler)
        for file in tag.manifest:
            key = (tag.name, str(file))
            if options.setdefault(key, of_tag) != of_tag:
                fail("manifest {} is named twice for the repository {}, with other arguments".format(file, tag.name))
            files = manifests.setdefault(tag.name, [])
            if file not in files:
                files.append(file)
        libraries.setdefault(tag.name, []).extend(tag.kernels)
        for folder in tag.kernels:
            data.setdefault(str(folder), []).extend([str(label) for label in tag.data])
    return {
        name: struct(
            data = data,
            libraries = _once(libraries.get(name, [])),
            manifests = files,
            options = {str(file): options[(name, str(file))] for file in files},
        )
        for name, files in manifests.items()
    }

def _once(labels):
    return {label: None for label in labels}.keys()

neuron = module_extension(
    doc = "Plans the kernels of all named manifests into one repository, so that manifests share kernels, or into several repositories.",
    implementation = _neuron_impl,
    tag_classes = {"kernels": _kernels},
)

def _toolchains_impl(mctx):
    declare_dependencies()
    return _reproducible(mctx)

toolchains = module_extension(
    doc = "The Python environment of the build steps and the Neuron compiler found on this machine.",
    implementation = _toolchains_impl,
)

def _development_impl(mctx):
    declare_development_dependencies()
    return _reproducible(mctx)

development = module_extension(
    doc = "What this project's own tests and linters need.",
    implementation = _development_impl,
)
