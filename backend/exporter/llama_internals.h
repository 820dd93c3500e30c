// What no function of llama.h gives: lengths of caches, and graphs that llama.cpp builds only where it computes them. All of
// it uses llama.cpp's own classes, which change without notice.

#pragma once

#include "llama-context.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <cstdint>
#include <vector>

struct cache_lengths {
    int64_t n_kv     = 0;  // cells that the graph reads; 0 when there is no KV cache
    int64_t n_kv_swa = 0;  // the same of the layers with a sliding window; 0 when there are none
};

// Returns the lengths of a memory that has them; of one that is not known here there are none.
cache_lengths lengths_of(const llama_memory_context_i * memory);

// Returns the caches of a memory whose keys a context shift rotates; of one that is not known here none.
std::vector<const llama_kv_cache *> caches_of(const llama_memory_i * memory);

// Builds the graph that was reserved last again, without outputs, as llama_decode builds it.
ggml_cgraph * build_without_outputs(const llama_model & model, const llama_context & context);

// Builds the graph that shifts the positions of the keys in a cache.
ggml_cgraph * build_shift(const llama_kv_cache & cache, llm_graph_result & result, llama_context & context);

// Returns the parameters by which llama_encode builds the graph of some tokens.
llm_graph_params encoder_params(const llama_context & context, llm_graph_result & result, const llama_ubatch & tokens);

// Returns what an encoder has computed: a decoder attends to it.
llama_cross & cross_of(llama_context & context);
