// Models that are loaded without their weights.

#pragma once

#include "llama.h"
#include "sparse_file.h"

#include <cstdint>
#include <memory>
#include <vector>

struct free_model {
    void operator()(llama_model * m) const { llama_model_free(m); }
};

using model_ptr = std::unique_ptr<llama_model, free_model>;

// Loads a model without its weights. With more than one device llama.cpp splits its tensors over them.
//
// overrides  metadata in place of the files'
model_ptr load_model(const std::vector<sparse_file> &             files,
                     uint32_t                                     n_devices = 1,
                     bool                                         mtp       = false,
                     const std::vector<llama_model_kv_override> & overrides = {});

// Sets the tensors' types to those that llama-quantize would choose.
void quantize(std::vector<sparse_file> & files, llama_ftype ftype);
