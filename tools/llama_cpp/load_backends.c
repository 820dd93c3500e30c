// Preloaded into a program of llama.cpp that was built with dynamic backends but does not load them, such as
// test-llama-archs. Loads the backends before main. After main, it flushes llama.cpp's log, whose thread would lose the
// pending lines. Processes that the program starts get no preloaded library.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>

typedef int (*main_function)(int, char **, char **);
typedef int (*start_function)(main_function, int, char **, void (*)(void), void (*)(void), void (*)(void), void *);

static main_function program;

static int main_with_backends(int argc, char ** argv, char ** envp) {
    unsetenv("LD_PRELOAD");
    void (*load_all)(void) = (void (*)(void)) dlsym(RTLD_DEFAULT, "ggml_backend_load_all");
    if (load_all) {
        load_all();
    }
    int status                     = program(argc, argv, envp);
    // common_log_flush(common_log_main()) of common/log.h, if the program has it
    void * (*log_of_program)(void) = (void * (*)(void) ) dlsym(RTLD_DEFAULT, "_Z15common_log_mainv");
    void (*flush)(void *)          = (void (*)(void *)) dlsym(RTLD_DEFAULT, "_Z16common_log_flushP10common_log");
    if (log_of_program && flush) {
        flush(log_of_program());
    }
    return status;
}

// Replaces the C library's function, which calls main after all libraries are initialized.
int __libc_start_main(main_function main,
                      int           argc,
                      char **       argv,
                      void (*init)(void),
                      void (*fini)(void),
                      void (*rtld_fini)(void),
                      void * stack_end) {
    start_function start = (start_function) dlsym(RTLD_NEXT, "__libc_start_main");
    program              = main;
    return start(main_with_backends, argc, argv, init, fini, rtld_fini, stack_end);
}
