#include "scheduler_log.h"

#include <cstdio>
#include <cstring>

thread_local assigned * watched = nullptr;

// "node # 12 (   MUL_MAT):  Qcur-0 (  16K) [NEURO         ] use=…": the scheduler cuts the names of backends to five
// characters
void read_log(enum ggml_log_level level, const char * text, void * /* user_data */) {
    if (level == GGML_LOG_LEVEL_ERROR || level == GGML_LOG_LEVEL_WARN) {
        fputs(text, stderr);
    }
    char op[16];
    char backend[16];
    int  index = 0;
    if (!watched || sscanf(text, "node #%d ( %15[^)]): %*[^[][ %15[A-Za-z0-9]", &index, op, backend) != 3) {
        return;
    }
    watched->graphs += index == 0;
    if (strncmp(backend, "NEURO", 5) == 0 || strncmp(backend, "Meta", 4) == 0) {
        watched->device++;
    } else {
        watched->cpu[op]++;
    }
}
