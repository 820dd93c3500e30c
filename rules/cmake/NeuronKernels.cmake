# Kernels for AWS Neuron as CMake targets.
#
#     find_package(NeuronKernels REQUIRED)          # or include() of this file, or add_subdirectory() of the repository
#
#     add_neuron_kernels(llama3_kernels
#         MANIFEST llama3.yaml
#         TARGETS  trn1 inf2
#         FORM     EMBED PACK)
#     target_link_libraries(my_backend PRIVATE llama3_kernels)
#
# `add_neuron_kernels(<name> MANIFEST <file>... [...])` builds the kernels of manifests (docs/reference/manifest.md) and declares
# the library <name>, with the alias NeuronKernels::<name>. A program that links to the library gets the kernels, and
# NeuronKernels::neuron_kernels, which finds kernels in them (docs/reference/cpp-library.md).
#
#   MANIFEST <file>...    YAML files; relative to the current source folder.
#   TARGETS <target>...   builds only these targets of the manifests; the default is all of them. Each manifest must have each target.
#   COMPILER <choice>     auto | neuronx-cc | simulator, like Bazel's --//rules:compiler. `auto`, the default, selects neuronx-cc if it
#                         is installed (in the virtual environment that NEURON_SDK names, or on PATH), else the simulator, whose
#                         NEFFs load on no device. -DNEURON_KERNELGEN_COMPILER=<choice> sets the default of all calls.
#   FORM <form>...        the forms of each manifest and target; the default is EMBED.
#                           EMBED   part of the program: <neuron_kernels/<manifest>_<target>.h> declares the bundle
#                           PACK    one file, <manifest>_<target>.kernels.gguf
#                           TREE    a folder with every HLO and NEFF as a file
#                           REPORT  a page about the kernels, <manifest>_<target>.report.html (docs/reference/report.md)
#   MEMORY_PER_COMPILE <size>   the memory that one compile reserves and may use: 8G, 6144M. The default is in the manifest or in the table of
#                         targets. As many compiles run at once as fit into four fifths of the machine's memory.
#   KERNELS <folder>...   your own folders of emitters (docs/guides/write-a-kernel.md); they override kernelgen's emitters.
#   DATA <file>...        files that the emitters of KERNELS read; a target goes before the files that it generates.
#   EXCLUDE_FROM_ALL      builds the kernels only for a target that needs them, or by name.
#
# Targets: <name>; <name>.kernels builds every form. Properties of <name>, for install(FILES) and tests:
# NEURON_KERNELS_BUNDLES (names such as llama3_trn1), NEURON_KERNELS_PACKS, NEURON_KERNELS_TREES, NEURON_KERNELS_REPORTS,
# NEURON_KERNELS_HEADERS.
#
# CMake plans the kernels when it configures, and configures again when a manifest, a folder of kernels or kernelgen changes. The build
# machine needs Python 3.11 or later. kernelgen's packages come from a virtual environment with the versions of requirements.txt,
# pinned by hash. The first use creates it in the user's cache folder.
#
#   NEURON_KERNELGEN_PYTHON       the interpreter to use. If it has the packages, it runs kernelgen itself; else it creates the
#                                 environment.
#   NEURON_KERNELGEN_PYTHON_ENV   OFF: create no environment; packages that the interpreter lacks are an error.
#   NEURON_KERNELGEN_NEFF_CACHE   a folder of NEFFs, by all inputs of their compiles, that this machine's builds share; `off` for none.
#                                 The default is a folder in the user's cache folder.
#   NEURON_KERNELGEN_SHARED_CACHE, NEURON_KERNELGEN_SHARED_CACHE_MODE, NEURON_KERNELGEN_SHARED_CACHE_TIMEOUT
#                                 a cache that machines share: a folder or a URL; read-write or read-only; seconds. See docs/reference/caching.md.
#
# These and NEURON_SDK are CMake variables. When CMake first runs, environment variables of the same name set them.
#
# Ninja and Makefile generators; CMake 3.20 or later.

if(CMAKE_VERSION VERSION_LESS 3.20)
    message(FATAL_ERROR "add_neuron_kernels() needs CMake 3.20 or later; this is ${CMAKE_VERSION}")
endif()
include_guard(GLOBAL)
cmake_policy(VERSION 3.20...3.25)

function(add_neuron_kernels name)
    set(flags EXCLUDE_FROM_ALL)
    set(single COMPILER MEMORY_PER_COMPILE)
    set(several DATA FORM KERNELS MANIFEST TARGETS)
    cmake_parse_arguments(PARSE_ARGV 1 ARG "${flags}" "${single}" "${several}")
    set(call "add_neuron_kernels(${name})")

    _neuron_kernels_check_words()
    _neuron_kernels_read_files()
    _neuron_kernels_read_settings()
    _neuron_kernels_plan()

    set(watched ${MANIFEST} "${root}/requirements.txt")
    _neuron_kernels_library("${root}")
    # In its own folder, because a folder can enable languages and a function cannot.
    set(exclude)
    if(ARG_EXCLUDE_FROM_ALL)
        set(exclude EXCLUDE_FROM_ALL)
    endif()
    add_subdirectory("${root}/rules/cmake/kernels" "${folder}" ${exclude})
endfunction()

# --- Steps of add_neuron_kernels(), in its scope: ARG_* are its arguments, `call` is the beginning of its messages ----------

# Ends with an error for a wrong name, generator or argument.
macro(_neuron_kernels_check_words)
    if(TARGET "${name}")
        message(FATAL_ERROR "${call}: there is a target of that name already")
    elseif(NOT name MATCHES "^[A-Za-z0-9_.+-]+$")
        message(FATAL_ERROR "${call}: a target's name has letters, digits and _ . + - only")
    elseif(NOT CMAKE_GENERATOR MATCHES "Ninja|Makefiles")
        message(FATAL_ERROR "${call}: builds with Ninja or make, not with ${CMAKE_GENERATOR}")
    endif()
    foreach(word IN LISTS ARG_UNPARSED_ARGUMENTS)
        _neuron_kernels_nearest(near "${word}" ${flags} ${single} ${several})
        message(FATAL_ERROR "${call}: unknown argument '${word}'${near}")
    endforeach()
    foreach(keyword IN LISTS ARG_KEYWORDS_MISSING_VALUES)
        message(FATAL_ERROR "${call}: ${keyword} is given no value")
    endforeach()
    # A misspelt keyword becomes a value of the argument before it.
    foreach(keyword MANIFEST TARGETS KERNELS DATA)
        foreach(value IN LISTS ARG_${keyword})
            if(value MATCHES "^[A-Z_]+$" AND NOT EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/${value}")
                _neuron_kernels_nearest(near "${value}" ${flags} ${single} ${several})
                message(FATAL_ERROR "${call}: ${keyword} is given '${value}'${near}")
            endif()
        endforeach()
    endforeach()
endmacro()

# Sets MANIFEST and KERNELS to absolute paths, `data` to the targets in DATA, and `data_files` to the files in it.
macro(_neuron_kernels_read_files)
    if(NOT ARG_MANIFEST)
        message(FATAL_ERROR "${call}: MANIFEST names no file")
    endif()
    foreach(keyword MANIFEST KERNELS)
        set(paths)
        foreach(path IN LISTS ARG_${keyword})
            get_filename_component(full "${path}" ABSOLUTE)
            if(NOT EXISTS "${full}")
                message(FATAL_ERROR "${call}: ${keyword} ${path}: there is no ${full}")
            endif()
            list(APPEND paths "${full}")
        endforeach()
        set(${keyword} "${paths}")
    endforeach()

    set(data)
    set(data_files)
    foreach(file IN LISTS ARG_DATA)
        get_filename_component(full "${file}" ABSOLUTE)
        if(TARGET "${file}")
            list(APPEND data "${file}")
        elseif(EXISTS "${full}" OR data) # a target before it may generate it
            list(APPEND data_files "${full}")
        else()
            message(FATAL_ERROR "${call}: DATA ${file}: there is neither a target of that name nor ${full}")
        endif()
    endforeach()
endmacro()

# Sets `compiler` and FORM. The cache variables are the defaults of calls.
macro(_neuron_kernels_read_settings)
    set(compiler auto)
    foreach(choice "${NEURON_KERNELGEN_COMPILER}" "${ARG_COMPILER}")
        if(choice)
            set(compiler "${choice}")
        endif()
    endforeach()
    _neuron_kernels_choice("${call}: COMPILER" "${compiler}" auto neuronx-cc simulator)
    set(FORM EMBED)
    if(ARG_FORM)
        set(FORM "${ARG_FORM}")
    endif()
    foreach(form IN LISTS FORM)
        _neuron_kernels_choice("${call}: FORM" "${form}" EMBED PACK REPORT TREE)
    endforeach()
    if(DEFINED ARG_MEMORY_PER_COMPILE AND NOT ARG_MEMORY_PER_COMPILE MATCHES "^[1-9][0-9]?[0-9]?[0-9]?[0-9]?[0-9]?[MG]$")
        message(FATAL_ERROR "${call}: MEMORY_PER_COMPILE is an amount such as 8G or 6144M, not '${ARG_MEMORY_PER_COMPILE}'")
    endif()
endmacro()

# Plans the kernels and writes the build's files into `folder`. Sets `root`, `python` and `environment`, with which the steps run.
macro(_neuron_kernels_plan)
    _neuron_kernels_root(root)
    _neuron_kernels_python(python "${call}")
    set(folder "${CMAKE_CURRENT_BINARY_DIR}/neuron_kernels/${name}")
    set(arguments)
    foreach(path IN LISTS KERNELS)
        list(APPEND arguments --kernels "${path}")
    endforeach()
    foreach(file IN LISTS data_files)
        list(APPEND arguments --data "${file}")
    endforeach()
    foreach(target IN LISTS ARG_TARGETS)
        list(APPEND arguments --target "${target}")
    endforeach()
    foreach(form IN LISTS FORM)
        list(APPEND arguments --form "${form}")
    endforeach()
    if(ARG_MEMORY_PER_COMPILE)
        list(APPEND arguments --memory-per-compile "${ARG_MEMORY_PER_COMPILE}")
    endif()
    _neuron_kernels_remember(NEURON_KERNELGEN_NEFF_CACHE "Folder of NEFFs that this machine's builds share, or off")
    _neuron_kernels_remember(NEURON_KERNELGEN_SHARED_CACHE "Folder or URL of NEFFs that machines share")
    _neuron_kernels_remember(NEURON_KERNELGEN_SHARED_CACHE_MODE "read-write or read-only")
    _neuron_kernels_remember(NEURON_KERNELGEN_SHARED_CACHE_TIMEOUT "Seconds that one NEFF of the shared cache may take")
    set(caches)
    foreach(variable NEFF_CACHE SHARED_CACHE SHARED_CACHE_MODE SHARED_CACHE_TIMEOUT)
        list(APPEND caches "NEURON_KERNELGEN_${variable}=${NEURON_KERNELGEN_${variable}}")
    endforeach()
    _neuron_kernels_remember(NEURON_SDK "Virtual environment that holds neuronx-cc")
    set(environment "PYTHONPATH=${root}/tools" PYTHONDONTWRITEBYTECODE=1 PYTHONUTF8=1 --unset=PYTHONHOME "NEURON_SDK=${NEURON_SDK}" ${caches})
    execute_process(
        COMMAND "${CMAKE_COMMAND}" -E env ${environment}
                "${python}" -P -m kernelgen generate cmake --output "${folder}" --compiler "${compiler}" ${arguments} -- ${MANIFEST}
        RESULT_VARIABLE status
        OUTPUT_VARIABLE said
        ERROR_VARIABLE mistakes
        OUTPUT_STRIP_TRAILING_WHITESPACE
        ERROR_STRIP_TRAILING_WHITESPACE
    )
    # CMake prints indented lines unchanged, and reflows others into paragraphs.
    if(NOT status EQUAL 0)
        string(REPLACE "\n" "\n  " mistakes "${mistakes}")
        message(FATAL_ERROR "${call}:\n  ${mistakes}")
    endif()
    string(REPLACE "\n" "\n--   " said "${said}")
    message(STATUS "${call}: ${said}")
endmacro()

# --- Checking arguments --------------------------------------------------------------------------------------------------

# Ends with an error unless `value` is one of the other arguments.
function(_neuron_kernels_choice what value)
    if(NOT value IN_LIST ARGN)
        _neuron_kernels_nearest(near "${value}" ${ARGN})
        list(JOIN ARGN ", " known)
        message(FATAL_ERROR "${what}: unknown value '${value}'${near} (known: ${known})")
    endif()
endfunction()

# Sets `out` to ": did you mean 'X'?" with the other argument that is most similar to `word`, or to an empty text.
function(_neuron_kernels_nearest out word)
    set(near)
    _neuron_kernels_root(root)
    _neuron_kernels_any_python(python)
    if(python)
        execute_process(
            COMMAND "${CMAKE_COMMAND}" -E env "PYTHONPATH=${root}/tools" PYTHONDONTWRITEBYTECODE=1 --unset=PYTHONHOME "${python}" -P -c
                    "import sys; from kernelgen.errors import did_you_mean; print(did_you_mean(sys.argv[1], sys.argv[2:]))"
                    "${word}" ${ARGN}
            OUTPUT_VARIABLE near
            ERROR_QUIET # the error that is on its way differs
            OUTPUT_STRIP_TRAILING_WHITESPACE
        )
    endif()
    set(${out} "${near}" PARENT_SCOPE)
endfunction()

# --- Tools and libraries ---------------------------------------------------------------------------------------------------

# Sets `out` to the folder that holds kernelgen: the repository, or its copy in an installation.
function(_neuron_kernels_root out)
    get_filename_component(root "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../.." ABSOLUTE)
    set(${out} "${root}" PARENT_SCOPE)
endfunction()

# Makes the target NeuronKernels::neuron_kernels if neither an installation nor the project has it.
function(_neuron_kernels_library root)
    if(NOT TARGET NeuronKernels::neuron_kernels)
        if(NOT EXISTS "${root}/backend/bundle")
            # Imported targets are visible in the folder that imports them and below it.
            message(FATAL_ERROR "find_package(NeuronKernels) is needed in ${CMAKE_CURRENT_SOURCE_DIR} or a folder above it")
        endif()
        add_subdirectory("${root}/backend/bundle" "${CMAKE_BINARY_DIR}/neuron_kernels/library" EXCLUDE_FROM_ALL)
    endif()
endfunction()

# Copies an environment variable to a CMake variable: builds run CMake again, and their environment may lack it.
function(_neuron_kernels_remember variable what)
    if(NOT DEFINED ${variable})
        set(${variable} "$ENV{${variable}}" CACHE STRING "${what}")
    endif()
endfunction()

# Sets `out` to an interpreter that has kernelgen's packages.
function(_neuron_kernels_python out call)
    get_property(known GLOBAL PROPERTY _NEURON_KERNELS_PYTHON)
    if(known)
        set(${out} "${known}" PARENT_SCOPE)
        return()
    endif()
    _neuron_kernels_root(root)
    set(check "${root}/rules/cmake/check_packages.py")

    _neuron_kernels_any_python(python)
    if(NOT python AND NEURON_KERNELGEN_PYTHON)
        message(FATAL_ERROR "${call}: NEURON_KERNELGEN_PYTHON is ${NEURON_KERNELGEN_PYTHON}, which is not a Python 3.11 or later that runs")
    elseif(NOT python)
        message(FATAL_ERROR "${call}: there is no Python 3.11 or later on PATH. One of these fixes it:\n"
            "  apt-get install python3-venv                 on Debian 12 and Ubuntu 24.04 or later\n"
            "  cmake -DNEURON_KERNELGEN_PYTHON=<interpreter>    when it is elsewhere")
    endif()
    # An interpreter that the user did not name must have the exact versions of the environment, so that all builds are equal.
    set(wanted requirements.txt)
    if(NEURON_KERNELGEN_PYTHON)
        set(wanted requirements.in)
    endif()

    execute_process(COMMAND "${python}" -I "${check}" "${root}/${wanted}" RESULT_VARIABLE status OUTPUT_VARIABLE missing ERROR_VARIABLE missing)
    if(NOT status EQUAL 0)
        if(DEFINED NEURON_KERNELGEN_PYTHON_ENV AND NOT NEURON_KERNELGEN_PYTHON_ENV)
            string(STRIP "${missing}" missing)
            string(REPLACE "\n" "\n  " missing "${missing}")
            message(FATAL_ERROR "${call}: ${python} lacks packages that kernelgen needs:\n  ${missing}\nOne of these fixes it:\n"
                "  ${python} -m pip install -r \"${root}/requirements.txt\"\n"
                "  cmake -DNEURON_KERNELGEN_PYTHON=<interpreter that has them>\n"
                "  cmake -DNEURON_KERNELGEN_PYTHON_ENV=ON    an environment of its own, made in the user's cache folder")
        endif()
        if(NOT _NEURON_KERNELS_ENVIRONMENT)
            message(CHECK_START "Python environment of kernelgen (made on first use)")
        endif()
        execute_process(
            COMMAND "${CMAKE_COMMAND}" -E env --unset=PYTHONPATH --unset=PYTHONHOME PYTHONDONTWRITEBYTECODE=1
                    "${python}" "${root}/rules/private/repositories/python_env.py" --lock "${root}/requirements.txt"
                    --fallback "${CMAKE_BINARY_DIR}/neuron_kernels/python"
            RESULT_VARIABLE status
            OUTPUT_VARIABLE made
            ERROR_VARIABLE mistakes
            ERROR_STRIP_TRAILING_WHITESPACE
        )
        if(NOT status EQUAL 0)
            if(NOT _NEURON_KERNELS_ENVIRONMENT)
                message(CHECK_FAIL "failed")
            endif()
            string(REPLACE "\n" "\n  " mistakes "${mistakes}")
            message(FATAL_ERROR "${call}: the Python environment of kernelgen can't be made:\n  ${mistakes}\n"
                "-DNEURON_KERNELGEN_PYTHON=<interpreter> names an interpreter that has the packages of ${root}/requirements.txt.")
        endif()
        string(JSON path GET "${made}" path)
        if(NOT _NEURON_KERNELS_ENVIRONMENT)
            message(CHECK_PASS "${path}")
        endif()
        set(_NEURON_KERNELS_ENVIRONMENT "${path}" CACHE INTERNAL "What was printed about")
        set(python "${path}/bin/python")
    endif()
    set_property(GLOBAL PROPERTY _NEURON_KERNELS_PYTHON "${python}")
    set(${out} "${python}" PARENT_SCOPE)
endfunction()

# Sets `out` to the Python that runs kernelgen or creates its environment: the one that the user names, or one on PATH, or nothing.
function(_neuron_kernels_any_python out)
    _neuron_kernels_remember(NEURON_KERNELGEN_PYTHON "Python 3.11 or later that runs kernelgen, or makes its environment")
    set(names "${NEURON_KERNELGEN_PYTHON}")
    if(NOT names)
        # Prefers the system's python3 if it is new enough.
        set(names "${Python3_EXECUTABLE}" python3 python3.14 python3.13 python3.12 python3.11)
    endif()
    foreach(name IN LISTS names)
        _neuron_kernels_interpreter(python "${name}")
        if(python)
            break()
        endif()
    endforeach()
    set(${out} "${python}" PARENT_SCOPE)
endfunction()

# Sets `out` to the full path of a Python 3.11 or later on the build machine, also in a cross build; to nothing if `name` is not one.
function(_neuron_kernels_interpreter out name)
    set(found)
    if(name)
        find_program(_neuron_kernels_program NAMES "${name}" NO_CMAKE_FIND_ROOT_PATH)
        if(_neuron_kernels_program)
            execute_process(
                COMMAND "${_neuron_kernels_program}" -I -c "import sys; sys.exit(sys.version_info < (3, 11))"
                RESULT_VARIABLE status
                OUTPUT_QUIET
                ERROR_QUIET
            )
            if(status EQUAL 0)
                set(found "${_neuron_kernels_program}")
            endif()
        endif()
        unset(_neuron_kernels_program CACHE)
    endif()
    set(${out} "${found}" PARENT_SCOPE)
endfunction()
