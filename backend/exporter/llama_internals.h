// Data that llama.h does not offer: lengths of caches, and graphs that llama.cpp builds only when it computes them. This code
// uses llama.cpp's internal classes, which may change in any version.

#pragma once

#include "llama-context.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <cstdint>
#include <vector>

struct cache_lengths {
    int64_t n_kv     = 0;  // cells that the graph reads; 0 when there is no KV cache
    int64_t n_kv_swa = 0;  // the same for layers with a sliding window; 0 without such layers
};

// Returns the lengths of a memory; zeros for an unknown kind of memory.
cache_lengths lengths_of(const llama_memory_context_i * memory);

// Returns the caches whose keys a context shift rotates; none for an unknown kind of memory.
std::vector<const llama_kv_cache *> caches_of(const llama_memory_i * memory);

// Builds the last reserved graph again without outputs, as llama_decode builds it.
ggml_cgraph * build_without_outputs(const llama_model & model, const llama_context & context);

// Builds the graph that shifts the positions of the keys in a cache.
ggml_cgraph * build_shift(const llama_kv_cache & cache, llm_graph_result & result, llama_context & context);

// Returns the parameters with which llama_encode builds the graph for some tokens.
llm_graph_params encoder_params(const llama_context & context, llm_graph_result & result, const llama_ubatch & tokens);

// Returns the result of the encoder, to which a decoder attends.
llama_cross & cross_of(llama_context & context);
