# Within llama.cpp, when all of its targets are there: compile once the headers that most of the backend's files read.

function(precompile)
    foreach(header algorithm atomic chrono functional map memory mutex string unordered_map unordered_set vector)
        target_precompile_headers(ggml-neuron PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:<${header}$<ANGLE-R>>")
    endforeach()
endfunction()

cmake_language(DEFER CALL precompile)
