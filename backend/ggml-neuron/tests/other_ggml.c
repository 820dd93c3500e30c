// Tests preload this: ggml then reports the version OTHER_GGML_VERSION.

#include <stdlib.h>

const char * ggml_version(void) {
    const char * version = getenv("OTHER_GGML_VERSION");
    return version ? version : "";
}
