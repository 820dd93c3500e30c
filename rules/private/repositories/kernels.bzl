"""The repository of kernel targets: it generates build files from manifests.

It runs `kernelgen generate bazel`, again whenever a manifest, an emitter or the generator changes. If the files stay the same, a build
has nothing to do.
"""

def _python_files(folder):
    """Returns the .py, .json and .j2 files below a folder, and watches for new ones."""
    files = []
    todo = [folder]

    # Starlark has no while loop; folders are never nested this deep.
    for _ in range(1000):
        if not todo:
            break
        for entry in todo.pop().readdir(watch = "yes"):
            if entry.is_dir:
                if entry.basename != "__pycache__":
                    todo.append(entry)
            elif entry.basename.rpartition(".")[2] in ("py", "json", "j2"):
                files.append(entry)
    return files

def _shown(path, root):
    """Returns a path as a user writes it: relative if it is below the workspace."""
    return str(path).removeprefix(str(root) + "/")

def _kernels_impl(rctx):
    tools = rctx.path(rctx.attr._tool).dirname
    python = rctx.path(rctx.attr._python)
    rctx.watch(python)

    # A tree, because Bazel fails when a folder that is watched by itself disappears, as an update may cause.
    rctx.watch_tree(tools)
    command = [python, "-P", "-m", "kernelgen", "generate", "bazel", "--output", str(rctx.path("."))]
    command += ["--rules", _repository(rctx.attr._tool)]
    for library in rctx.attr.libraries:
        folder = rctx.path(library).dirname
        for file in _python_files(folder):
            rctx.watch(file)

        # The name of a library is its folder's name. kernelgen's own library is always present.
        if library == Label("//kernels:BUILD.bazel"):
            continue
        command += ["--kernels", str(folder)]
        command += ["--package", "{}={}//{}".format(folder.basename, _repository(library), library.package)]
        for label in rctx.attr.data.get(str(library), []):
            command += ["--data", "{}={}".format(folder.basename, label)]
    for module, repository in rctx.attr.modules.items():
        command += ["--module", "{}={}".format(module, repository)]
    for manifest in rctx.attr.manifests:
        path = rctx.path(manifest)
        if not path.exists:
            fail("manifest {}: there is no file {}".format(manifest, path))
        rctx.watch(path)

        # The paths of kernels in a manifest are relative to its repository.
        root = str(path).removesuffix("/".join(["", manifest.package, manifest.name] if manifest.package else ["", manifest.name]))
        command += ["--workspace", "{}={}".format(root, _repository(manifest))]
        shown = _shown(path, rctx.workspace_root)
        for option in rctx.attr.options.get(str(manifest), []):
            command += ["--of", shown, option]
        command.append(shown)
    rctx.report_progress("planning kernels")
    done = rctx.execute(
        command,
        environment = {"PYTHONPATH": str(tools.dirname), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"},
        working_directory = str(rctx.workspace_root),
    )
    if done.return_code:
        fail("kernels can't be planned\n\n" + done.stderr + done.stdout)
    for file in done.stdout.splitlines():
        rctx.watch(file)

def _repository(label):
    return str(label).partition("//")[0]

def manifest_options(targets, memory_per_compile, compiler):
    """Returns a manifest's build options for `kernelgen generate bazel --of`.

    Args:
        targets: the targets to build; all of the manifest's if empty.
        memory_per_compile: the memory to reserve for one compile, or an empty text.
        compiler: `auto`, `neuronx-cc` or `simulator`; an empty text for the build's setting.

    Returns:
        a list of `NAME=VALUE`.
    """
    options = ["target=" + target for target in targets]
    if memory_per_compile:
        options.append("memory_per_compile=" + memory_per_compile)
    if compiler:
        options.append("compiler=" + compiler)
    return options

kernels_repository = repository_rule(
    doc = "One package of kernels shared by all manifests, and one of bundles.",
    implementation = _kernels_impl,
    attrs = {
        "data": attr.string_list_dict(doc = "Labels of the files that a library's emitters open, by the library's label."),
        "manifests": attr.label_list(allow_files = [".yaml", ".yml"], doc = "The manifests."),
        "libraries": attr.label_list(doc = "A label in the package of each folder of emitters; searched in this order."),
        "modules": attr.string_dict(doc = "Repositories of other modules that call theirs by this name, by the module's name."),
        "options": attr.string_list_dict(doc = "What `manifest_options` returns, by the manifest's label."),
        "_python": attr.label(default = "@neuron_python//:python"),
        "_tool": attr.label(default = "//tools/kernelgen:__init__.py"),
    },
)
