# Within llama.cpp, as llama.cmake, with the server: it waits for the model, so that none of its own code needs optimizing.

include("${CMAKE_CURRENT_LIST_DIR}/llama.cmake")

function(hasten_server)
    # mtmd-helper*.cpp refuse the headers that the others include.
    compile_together(mtmd mtmd-helper.cpp mtmd-helper-gen.cpp)
    compile_together(server-context)
    compile_together(llama-server-impl)
    foreach(target mtmd server-context llama-server-impl)
        target_compile_options(${target} PRIVATE -O0)
    endforeach()
endfunction()

cmake_language(DEFER CALL hasten_server)
