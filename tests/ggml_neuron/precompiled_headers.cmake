# Included by llama.cpp after all of its targets exist. Precompiles the headers that most of the backend's files include.

function(precompile)
    set(headers algorithm array atomic chrono cmath cstdio cstdlib cstring functional limits map memory mutex optional string
        string_view unordered_map unordered_set vector)
    foreach(header IN LISTS headers)
        target_precompile_headers(ggml-neuron PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:<${header}$<ANGLE-R>>")
    endforeach()
endfunction()

cmake_language(DEFER CALL precompile)
