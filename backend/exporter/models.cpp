#include "models.h"

#include "complaints.h"
#include "ggml-cpp.h"
#include "gguf.h"
#include "llama-ext.h"
#include "split_devices.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>

model_ptr load_model(const std::vector<sparse_file> &             files,
                     uint32_t                                     n_devices,
                     bool                                         mtp,
                     const std::vector<llama_model_kv_override> & overrides) {
    std::vector<const char *> paths;
    for (const sparse_file & file : files) {
        paths.push_back(file.path().c_str());
    }
    ggml_backend_dev_t no_device = nullptr;
    llama_model_params params    = llama_model_default_params();
    params.devices               = &no_device;
    params.n_gpu_layers          = 0;
    if (n_devices > 1) {
        params.devices      = split_devices(n_devices);
        params.n_gpu_layers = INT32_MAX;
        params.split_mode   = LLAMA_SPLIT_MODE_TENSOR;
    }
    std::vector<llama_model_kv_override> terminated = overrides;
    terminated.emplace_back();
    params.kv_overrides      = terminated.data();
    params.load_mode         = LLAMA_LOAD_MODE_NONE;
    params.use_extra_bufts   = false;
    params.no_alloc          = true;
    params.load_mtp          = mtp;
    params.progress_callback = [](float, void *) {
        return true;
    };
    model_ptr model(paths.size() == 1 ? llama_model_load_from_file(paths[0], params)
                                      : llama_model_load_from_splits(paths.data(), paths.size(), params));
    if (!model) {
        throw std::runtime_error("llama.cpp can't load the model: " + last_complaint);
    }
    return model;
}

// Returns the number of the layer that a tensor belongs to, or -1.
static int layer_of(const std::string & name) {
    int layer = -1;
    return sscanf(name.c_str(), "blk.%d.", &layer) == 1 ? layer : -1;
}

void quantize(std::vector<sparse_file> & files, llama_ftype ftype) {
    const model_ptr             model  = load_model(files);
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype                       = ftype;
    std::unique_ptr<quantize_state_impl, decltype(&llama_quant_free)>    state(llama_quant_init(model.get(), &params),
                                                                               llama_quant_free);
    // the types depend on the order of the tensors, which is the order of the layers
    std::vector<ggml_tensor *>                                           tensors;
    std::vector<std::unique_ptr<ggml_context, void (*)(ggml_context *)>> contexts;
    for (const sparse_file & file : files) {
        ggml_context *   context = nullptr;
        gguf_context_ptr header(gguf_init_from_file(file.path().c_str(), { /*.no_alloc =*/true, /*.ctx =*/&context }));
        if (!header) {
            throw std::runtime_error("the header can't be read again");
        }
        contexts.emplace_back(context, ggml_free);
        for (ggml_tensor * t = ggml_get_first_tensor(context); t; t = ggml_get_next_tensor(context, t)) {
            if (llama_quant_tensor_allows_quantization(state.get(), t)) {
                tensors.push_back(t);
            }
        }
    }
    std::stable_sort(tensors.begin(), tensors.end(), [](const ggml_tensor * a, const ggml_tensor * b) {
        return layer_of(a->name) < layer_of(b->name);
    });
    std::vector<ggml_type> types(tensors.size());
    llama_quant_compute_types(state.get(), ftype, tensors.data(), types.data(), tensors.size());
    std::map<std::string, ggml_type> by_name;
    for (size_t i = 0; i < tensors.size(); i++) {
        by_name[tensors[i]->name] = types[i];
    }
    for (sparse_file & file : files) {
        file.set_types(by_name);
    }
}
