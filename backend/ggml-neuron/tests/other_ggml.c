// Tests preload this library: ggml then reports the version in OTHER_GGML_VERSION, and with OTHER_GGML_OPS=1 it has an op
// before all others.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>

const char * ggml_version(void) {
    const char * version = getenv("OTHER_GGML_VERSION");
    return version ? version : "";
}

const char * ggml_op_name(int op) {
    typedef const char * (*op_name)(int);
    static op_name name;
    if (!name) {
        name = (op_name) dlsym(RTLD_NEXT, "ggml_op_name");
    }
    return name(getenv("OTHER_GGML_OPS") && op > 0 ? op - 1 : op);
}
