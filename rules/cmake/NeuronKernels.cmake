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
# `add_neuron_kernels(<name> MANIFEST <file>... [...])` builds the kernels that manifests ask for (docs/reference/manifest.md) and
# declares the library <name>, with the alias NeuronKernels::<name>, that brings them and NeuronKernels::neuron_kernels, which
# finds kernels in them (docs/reference/cpp-library.md), to a program that links to it.
#
#   MANIFEST <file>...    YAML files; relative to the current source folder.
#   TARGETS <target>...   only these targets of the manifests; all by default. Each manifest must be for each of them.
#   COMPILER <choice>     auto | neuronx-cc | simulator: as Bazel's --//rules:compiler. `auto`, the default, is neuronx-cc where
#                         it is installed (in the virtual environment that NEURON_SDK names, or on PATH) and elsewhere the
#                         simulator, whose NEFFs load on no device. -DNEURON_KERNELGEN_COMPILER=<choice> decides for all
#                         calls that do not say.
#   FORM <form>...        what to make of each manifest and target; EMBED by default.
#                           EMBED   part of the program: <neuron_kernels/<manifest>_<target>.h> declares the bundle
#                           PACK    one file, <manifest>_<target>.kernels.gguf
#                           TREE    a folder for GGML_NEURON_KERNEL_DIR
#                           REPORT  a page about the kernels, <manifest>_<target>.report.html (docs/reference/report.md)
#   MEMORY_PER_COMPILE <size>   what one compile is counted for and may use: 8G, 6144M. By default what the manifest or the table
#                         of targets says. As many compiles run at once as fit into four fifths of the machine's memory.
#   EMIT_TIMEOUT <seconds>  how long one kernel's emitter may run: 600 by default, 0 means no limit. As Bazel's --//rules:emit_timeout.
#                         -DNEURON_KERNELGEN_EMIT_TIMEOUT=<seconds> decides for all calls that do not say.
#   KERNELS <folder>...   emitters of your own (docs/guides/write-a-kernel.md); they win over kernelgen's.
#   DATA <file>...        files that the emitters of KERNELS open, and targets that make such files: they are made first.
#   EXCLUDE_FROM_ALL      built only when something that is built needs it, or by name.
#
# Targets: <name>; <name>.kernels builds every form. Properties of <name>, for install(FILES) and tests:
# NEURON_KERNELS_BUNDLES (names such as llama3_trn1), NEURON_KERNELS_PACKS, NEURON_KERNELS_TREES, NEURON_KERNELS_REPORTS,
# NEURON_KERNELS_HEADERS.
#
# Planning happens when CMake runs, and CMake runs by itself when a manifest, a folder of kernels or kernelgen changed. Python 3.11
# or later is needed on the machine that builds. kernelgen's packages come from a virtual environment with the versions of
# requirements.txt, pinned by hash, which is made in the user's cache folder when it is first needed.
#
#   NEURON_KERNELGEN_PYTHON       the interpreter to use. If it has the packages, it runs kernelgen itself; else it makes the
#                                 environment.
#   NEURON_KERNELGEN_PYTHON_ENV   OFF: make no environment; packages that the interpreter lacks are an error.
#   NEURON_KERNELGEN_NEFF_CACHE   a folder of NEFFs by what they depend on, which this machine's builds share; `off` for none. By default
#                                 a folder in the user's cache folder.
#   NEURON_KERNELGEN_SHARED_CACHE, NEURON_KERNELGEN_SHARED_CACHE_MODE, NEURON_KERNELGEN_SHARED_CACHE_TIMEOUT
#                                 one that machines share: a folder or a URL; read-write or read-only; seconds. See docs/reference/caching.md.
#
# These and NEURON_SDK are CMake variables; the environment's of the same name set them when CMake first runs.
#
# Ninja and Makefile generators; CMake 3.20 or later.

if(CMAKE_VERSION VERSION_LESS 3.20)
    message(FATAL_ERROR "add_neuron_kernels() needs CMake 3.20 or later; this is ${CMAKE_VERSION}")
endif()
include_guard(GLOBAL)
cmake_policy(VERSION 3.20...3.25)

function(add_neuron_kernels name)
    set(flags EXCLUDE_FROM_ALL)
    set(single COMPILER EMIT_TIMEOUT MEMORY_PER_COMPILE)
    set(several DATA FORM KERNELS MANIFEST TARGETS)
    cmake_parse_arguments(PARSE_ARGV 1 ARG "${flags}" "${single}" "${several}")
    set(call "add_neuron_kernels(${name})")

    _neuron_kernels_check_words()
    _neuron_kernels_read_files()
    _neuron_kernels_read_settings()
    _neuron_kernels_plan()

    file(GLOB_RECURSE generator "${root}/tools/kernelgen/*.py" "${root}/tools/kernelgen/*.j2" "${root}/tools/kernelgen/*.json")
    set(watched ${MANIFEST} ${generator} "${root}/requirements.txt")
    _neuron_kernels_library("${root}")
    # In a folder of its own, because languages can be enabled for a folder and not in a function.
    set(exclude)
    if(ARG_EXCLUDE_FROM_ALL)
        set(exclude EXCLUDE_FROM_ALL)
    endif()
    add_subdirectory("${root}/rules/cmake/kernels" "${folder}" ${exclude})
endfunction()

# --- Steps of add_neuron_kernels(), in its scope: what it was given is in ARG_*, `call` begins its messages ------------------

# Ends with an error for a name, a generator or words that it can't take.
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
    # A misspelt keyword counts as one more value of the argument before it.
    foreach(keyword MANIFEST TARGETS KERNELS DATA)
        foreach(value IN LISTS ARG_${keyword})
            if(value MATCHES "^[A-Z_]+$" AND NOT EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/${value}")
                _neuron_kernels_nearest(near "${value}" ${flags} ${single} ${several})
                message(FATAL_ERROR "${call}: ${keyword} is given '${value}'${near}")
            endif()
        endforeach()
    endforeach()
endmacro()

# Sets MANIFEST and KERNELS to whole paths, and `data` to the targets among DATA.
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

    # What an emitter reads is noted when it runs: a file needs no more than to be there.
    set(data)
    foreach(file IN LISTS ARG_DATA)
        get_filename_component(full "${file}" ABSOLUTE)
        if(TARGET "${file}")
            list(APPEND data "${file}")
        elseif(NOT EXISTS "${full}")
            message(FATAL_ERROR "${call}: DATA ${file}: there is neither a target of that name nor ${full}")
        endif()
    endforeach()
endmacro()

# Sets `compiler`, FORM and `emit_timeout`; a cache variable is for calls that do not say.
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

    set(emit_timeout)
    foreach(seconds "${NEURON_KERNELGEN_EMIT_TIMEOUT}" "${ARG_EMIT_TIMEOUT}")
        if(NOT "${seconds}" STREQUAL "")
            set(emit_timeout "${seconds}")
        endif()
    endforeach()
    if(NOT "${emit_timeout}" STREQUAL "" AND NOT "${emit_timeout}" MATCHES "^[0-9]+(\\.[0-9]+)?$")
        message(FATAL_ERROR "${call}: EMIT_TIMEOUT is a number of seconds, 0 for no limit, not '${emit_timeout}'")
    endif()
endmacro()

# Plans the kernels and writes the build's files into `folder`; sets `root`, `python` and `environment`, with which steps run.
macro(_neuron_kernels_plan)
    _neuron_kernels_root(root)
    _neuron_kernels_python(python "${call}")
    set(folder "${CMAKE_CURRENT_BINARY_DIR}/neuron_kernels/${name}")
    set(arguments)
    foreach(path IN LISTS KERNELS)
        list(APPEND arguments --kernels "${path}")
    endforeach()
    foreach(target IN LISTS ARG_TARGETS)
        list(APPEND arguments --target "${target}")
    endforeach()
    if(ARG_MEMORY_PER_COMPILE)
        list(APPEND arguments --memory-per-compile "${ARG_MEMORY_PER_COMPILE}")
    endif()
    if(NOT "${emit_timeout}" STREQUAL "")
        list(APPEND arguments --emit-timeout "${emit_timeout}")
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
    # Indented lines are shown as they are; others CMake would fill into paragraphs.
    if(NOT status EQUAL 0)
        string(REPLACE "\n" "\n  " mistakes "${mistakes}")
        message(FATAL_ERROR "${call}:\n  ${mistakes}")
    endif()
    string(REPLACE "\n" "\n--   " said "${said}")
    message(STATUS "${call}: ${said}")
endmacro()

# --- Checking arguments --------------------------------------------------------------------------------------------------

# Ends with an error unless `value` is one of the others.
function(_neuron_kernels_choice what value)
    if(NOT value IN_LIST ARGN)
        _neuron_kernels_nearest(near "${value}" ${ARGN})
        list(JOIN ARGN ", " known)
        message(FATAL_ERROR "${what}: unknown value '${value}'${near} (known: ${known})")
    endif()
endfunction()

# Sets `out` to ": did you mean 'X'?" for the word among the others that is nearest to `word`, or to nothing.
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

# --- What is needed --------------------------------------------------------------------------------------------------------

# Sets `out` to the folder that holds kernelgen: the repository, or its copy in an installation.
function(_neuron_kernels_root out)
    get_filename_component(root "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../.." ABSOLUTE)
    set(${out} "${root}" PARENT_SCOPE)
endfunction()

# Makes the target NeuronKernels::neuron_kernels where neither an installation nor the project has it.
function(_neuron_kernels_library root)
    if(NOT TARGET NeuronKernels::neuron_kernels)
        if(NOT EXISTS "${root}/backend/bundle")
            # Imported targets are known in the folder that imports them and below.
            message(FATAL_ERROR "find_package(NeuronKernels) is needed in ${CMAKE_CURRENT_SOURCE_DIR} or a folder above it")
        endif()
        add_subdirectory("${root}/backend/bundle" "${CMAKE_BINARY_DIR}/neuron_kernels/library" EXCLUDE_FROM_ALL)
    endif()
endfunction()

# Makes an environment variable a CMake variable, because CMake is run again by builds whose environment may lack it.
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
        message(FATAL_ERROR "${call}: there is no Python 3.11 or later on PATH. One of these mends it:\n"
            "  apt-get install python3-venv                 on Debian 12 and Ubuntu 24.04 or later\n"
            "  cmake -DNEURON_KERNELGEN_PYTHON=<interpreter>    when it is elsewhere")
    endif()
    # Who was not named must have what the environment would have, so that everyone builds the same.
    set(wanted requirements.txt)
    if(NEURON_KERNELGEN_PYTHON)
        set(wanted requirements.in)
    endif()

    execute_process(COMMAND "${python}" -I "${check}" "${root}/${wanted}" RESULT_VARIABLE status OUTPUT_VARIABLE missing ERROR_VARIABLE missing)
    if(NOT status EQUAL 0)
        if(DEFINED NEURON_KERNELGEN_PYTHON_ENV AND NOT NEURON_KERNELGEN_PYTHON_ENV)
            string(STRIP "${missing}" missing)
            string(REPLACE "\n" "\n  " missing "${missing}")
            message(FATAL_ERROR "${call}: ${python} lacks packages that kernelgen needs:\n  ${missing}\nOne of these mends it:\n"
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
        set(_NEURON_KERNELS_ENVIRONMENT "${path}" CACHE INTERNAL "What was told about")
        set(python "${path}/bin/python")
    endif()
    set_property(GLOBAL PROPERTY _NEURON_KERNELS_PYTHON "${python}")
    set(${out} "${python}" PARENT_SCOPE)
endfunction()

# Sets `out` to the Python that runs kernelgen or makes its environment, the one that is named if one is, or to nothing.
function(_neuron_kernels_any_python out)
    _neuron_kernels_remember(NEURON_KERNELGEN_PYTHON "Python 3.11 or later that runs kernelgen, or makes its environment")
    set(names "${NEURON_KERNELGEN_PYTHON}")
    if(NOT names)
        # The system's own comes first when it is new enough.
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

# Sets `out` to the full path of a Python 3.11 or later, or to nothing. It is the build machine's, also when compiling for another.
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
