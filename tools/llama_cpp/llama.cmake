# Included by llama.cpp after all of its targets exist. Compiles many files as one, as llama.cpp does for src/models: most of the
# time to compile a file goes into the headers that all of them include.

function(compile_together target)
    get_target_property(folder ${target} SOURCE_DIR)
    get_target_property(sources ${target} SOURCES)
    list(FILTER sources INCLUDE REGEX "\\.cpp$")
    list(TRANSFORM sources PREPEND "${folder}/" REGEX "^[^/]")
    list(TRANSFORM ARGN PREPEND "${folder}/" OUTPUT_VARIABLE alone)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
    set_source_files_properties(${sources} TARGET_DIRECTORY ${target} PROPERTIES SKIP_UNITY_BUILD_INCLUSION OFF)
    set_source_files_properties(${alone} TARGET_DIRECTORY ${target} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()

function(hasten)
    # Each file named here defines a name that another file also defines.
    compile_together(llama llama-kv-cache-dsv4.cpp)
    compile_together(llama-common json.cpp jinja/value.cpp)
    # The speed of these targets does not matter for the time of a model.
    foreach(target cpp-httplib llama-common llama-results test-backend-ops test-export-graph-ops test-fusion test-llama-archs)
        target_compile_options(${target} PRIVATE -O0)
    endforeach()
endfunction()

cmake_language(DEFER CALL hasten)
