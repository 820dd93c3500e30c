// Tests preload this library: ggml then reports the version in OTHER_GGML_VERSION.

#include <stdlib.h>

const char * ggml_version(void) {
    const char * version = getenv("OTHER_GGML_VERSION");
    return version ? version : "";
}
