// Loads a model with all of its layers on NeuronCores, makes a context, and prints the memory in use. It computes nothing.
//
//     capacity BACKENDS MODEL [KEY=NUMBER...]
//
// BACKENDS is the folder of ggml's own backends, MODEL a GGUF file. Keys: n_ctx; n_gpu_layers, by default all; fit=1: llama.cpp's
// own fit (common/fit.h) first chooses the values that are not given; fit_target: the margin in MiB that fit leaves free.
//
// It prints "fit STATUS n_gpu_layers=N n_ctx=N" with fit=1, then "loaded" or "not loaded", and for each device "NAME total=MiB
// free=MiB before=MiB", where `before` was free at the start. The exit status is 0 if the model was loaded, else 1.

#include "ggml-backend.h"
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

// The same declarations as in llama.cpp's common/fit.h.
enum common_params_fit_status {
    COMMON_PARAMS_FIT_STATUS_SUCCESS = 0,
};

struct common_fit_extra_model;

common_params_fit_status common_fit_params(const char *                       path_model,
                                           llama_model_params *               mparams,
                                           llama_context_params *             cparams,
                                           float *                            tensor_split,
                                           llama_model_tensor_buft_override * tensor_buft_overrides,
                                           size_t *                           margins,
                                           uint32_t                           n_ctx_min,
                                           const common_fit_extra_model *     extra,
                                           ggml_log_level                     log_level);

static std::vector<ggml_backend_dev_t> neurons() {
    std::vector<ggml_backend_dev_t> found;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(i);
        if (ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_GPU) {
            found.push_back(dev);
        }
    }
    return found;
}

static size_t free_memory(ggml_backend_dev_t dev, size_t * total) {
    size_t free = 0;
    ggml_backend_dev_memory(dev, &free, total);
    return free;
}

struct settings {
    std::map<std::string, long> numbers = {
        { "n_ctx",        0    },
        { "n_gpu_layers", -1   },
        { "fit",          0    },
        { "fit_target",   1024 }
    };

    bool read(const char * text) {
        const char * equals = strchr(text, '=');
        const auto   found  = equals ? numbers.find(std::string(text, equals)) : numbers.end();
        if (found == numbers.end()) {
            return false;
        }
        found->second = atol(equals + 1);
        return true;
    }
};

// Lets llama.cpp choose values, which it stores in these parameters.
static void fit(const char * path, const settings & s, llama_model_params & model, llama_context_params & context) {
    static std::vector<float>                            split(llama_max_devices());
    static std::vector<llama_model_tensor_buft_override> overrides(llama_max_tensor_buft_overrides());
    std::vector<size_t> margins(llama_max_devices(), (size_t) s.numbers.at("fit_target") << 20);

    const common_params_fit_status status = common_fit_params(path, &model, &context, split.data(), overrides.data(),
                                                              margins.data(), 512, nullptr, GGML_LOG_LEVEL_ERROR);
    printf("fit %s n_gpu_layers=%d n_ctx=%u\n", status == COMMON_PARAMS_FIT_STATUS_SUCCESS ? "success" : "failure",
           model.n_gpu_layers, context.n_ctx);
}

int main(int argc, char ** argv) {
    settings s;
    for (int i = 3; i < argc; i++) {
        if (!s.read(argv[i])) {
            argc = 0;
        }
    }
    if (argc < 3) {
        fprintf(stderr, "usage: capacity BACKENDS MODEL [n_ctx=N] [n_gpu_layers=N] [fit=1] [fit_target=MiB]\n");
        return 2;
    }
    ggml_backend_load_all_from_path(argv[1]);
    llama_backend_init();

    std::vector<size_t> before;
    size_t              total = 0;
    for (ggml_backend_dev_t dev : neurons()) {
        before.push_back(free_memory(dev, &total));
    }
    llama_model_params   model_params   = llama_model_default_params();
    llama_context_params context_params = llama_context_default_params();
    model_params.n_gpu_layers           = (int32_t) s.numbers["n_gpu_layers"];
    context_params.n_ctx                = (uint32_t) s.numbers["n_ctx"];
    if (s.numbers["fit"]) {
        fit(argv[2], s, model_params, context_params);
    }
    llama_model *   model   = llama_model_load_from_file(argv[2], model_params);
    llama_context * context = model ? llama_init_from_model(model, context_params) : nullptr;
    printf("%s\n", context ? "loaded" : "not loaded");
    for (size_t i = 0; i < before.size(); i++) {
        const size_t free = free_memory(neurons()[i], &total);
        printf("%s total=%zu free=%zu before=%zu\n", ggml_backend_dev_name(neurons()[i]), total >> 20, free >> 20,
               before[i] >> 20);
    }
    const bool loaded = context != nullptr;
    llama_free(context);
    llama_model_free(model);
    return loaded ? 0 : 1;
}
