# Included by llama.cpp like llama.cmake, with the server. The server waits for the model, so its own code needs no optimization.

include("${CMAKE_CURRENT_LIST_DIR}/llama.cmake")

function(hasten_server)
    # mtmd-helper*.cpp cannot include the headers of the other files.
    compile_together(mtmd mtmd-helper.cpp mtmd-helper-gen.cpp)
    compile_together(server-context)
    compile_together(llama-server-impl)
    foreach(target mtmd server-context llama-server-impl)
        target_compile_options(${target} PRIVATE -O0)
    endforeach()
endfunction()

cmake_language(DEFER CALL hasten_server)
