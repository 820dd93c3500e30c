// Loads a model with all of its layers on NeuronCores, makes a context, and prints the memory in use. It computes nothing.
//
//     capacity BACKENDS MODEL [KEY=NUMBER...]
//
// BACKENDS is the folder of ggml's own backends, MODEL a GGUF file. Keys: n_ctx; n_gpu_layers, by default all; fit=1: llama.cpp's
// own fit (common/fit.h) first chooses the values that are not given; fit_target: the margin in MiB that fit leaves free.
//
// It prints "fit STATUS n_gpu_layers=N n_ctx=N" with fit=1, then "loaded" or "not loaded", and for each device "NAME total=MiB
// free=MiB before=MiB", where `before` was free at the start. The exit status is 0 if the model was loaded, else 1.

#include "sides.h"

#include <cstdio>
#include <cstdlib>

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

static std::map<std::string, long> numbers = {
    { "n_ctx",        0    },
    { "n_gpu_layers", -1   },
    { "fit",          0    },
    { "fit_target",   1024 }
};

static size_t free_memory(ggml_backend_dev_t dev, size_t * total) {
    size_t free = 0;
    ggml_backend_dev_memory(dev, &free, total);
    return free;
}

// Lets llama.cpp choose values, which it stores in these parameters.
static void fit(const char * path, llama_model_params & model, llama_context_params & context) {
    static std::vector<float>                            split(llama_max_devices());
    static std::vector<llama_model_tensor_buft_override> overrides(llama_max_tensor_buft_overrides());
    std::vector<size_t> margins(llama_max_devices(), (size_t) numbers["fit_target"] << 20);

    const common_params_fit_status status = common_fit_params(path, &model, &context, split.data(), overrides.data(),
                                                              margins.data(), 512, nullptr, GGML_LOG_LEVEL_ERROR);
    printf("fit %s n_gpu_layers=%d n_ctx=%u\n", status == COMMON_PARAMS_FIT_STATUS_SUCCESS ? "success" : "failure",
           model.n_gpu_layers, context.n_ctx);
}

static void run(int argc, char ** argv) {
    for (int i = 3; i < argc; i++) {
        const std::string word   = argv[i];
        const size_t      equals = word.find('=');
        const auto        found  = numbers.find(word.substr(0, equals));
        if (found == numbers.end() || equals == std::string::npos) {
            fail(word + " is not a key and its number");
        }
        found->second = atol(word.c_str() + equals + 1);
    }
    const std::vector<ggml_backend_dev_t> cores = load_backends(argv[1]);
    std::vector<size_t>                   before;
    size_t                                total = 0;
    for (ggml_backend_dev_t core : cores) {
        before.push_back(free_memory(core, &total));
    }
    llama_model_params   model_params   = llama_model_default_params();
    llama_context_params context_params = llama_context_default_params();
    model_params.n_gpu_layers           = (int32_t) numbers["n_gpu_layers"];
    context_params.n_ctx                = (uint32_t) numbers["n_ctx"];
    if (numbers["fit"]) {
        fit(argv[2], model_params, context_params);
    }
    const model_ptr   model(llama_model_load_from_file(argv[2], model_params));
    const context_ptr context(model ? llama_init_from_model(model.get(), context_params) : nullptr);
    printf("%s\n", context ? "loaded" : "not loaded");
    for (size_t i = 0; i < cores.size(); i++) {
        const size_t free = free_memory(cores[i], &total);
        printf("%s total=%zu free=%zu before=%zu\n", ggml_backend_dev_name(cores[i]), total >> 20, free >> 20,
               before[i] >> 20);
    }
    if (!context) {
        fail("it is not loaded");
    }
}

int main(int argc, char ** argv) {
    return run_program(argc, 2, "capacity BACKENDS MODEL [n_ctx=N] [n_gpu_layers=N] [fit=1] [fit_target=MiB]",
                       [=] { run(argc, argv); });
}
