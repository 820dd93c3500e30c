// Prints the graphs that llama.cpp builds for a model, from the model's header alone. docs/reference/graphs.md describes what it prints.
//
// It asks llama.cpp itself: the model is loaded without its weights, a context keeps the books of its KV cache as in a
// run, and the graph that would be computed next is written out instead. Nothing is computed and no weight is read.
//
// llama.cpp ends the program where it meets something impossible (GGML_ASSERT), and a hostile file may do worse. So a
// child does the work, in bounded memory and time, and its parent says how it ended.

#include "../graph/graph_writer.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "gguf.h"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-ext.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"
#include "llama.h"
#include "options.h"
#include "projector.h"
#include "sparse_file.h"
#include "split_devices.h"

#include <dlfcn.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

constexpr int EXIT_BAD_INPUT = 2;

// A model of 500 layers in a context of 16 million cells needs 3 GiB and a minute; a header that asks for more than this is
// refused by the allocation.
constexpr rlim_t MAX_ADDRESS_SPACE       = (rlim_t) 16 << 30;
constexpr rlim_t MAX_CPU_SECONDS         = 300;
// llama.cpp reserves 2 x 370 MB of addresses for each device and buffer of its meta backend, and uses little of it.
constexpr rlim_t ADDRESS_SPACE_OF_DEVICE = (rlim_t) 6 << 30;

//
// llama.cpp's own messages
//

// The model that is read, for messages.
std::string model_name;

// What llama.cpp complained of: the reason when it refuses a file or ends the program.
std::string last_complaint;

std::string one_line(const char * text) {
    std::string line = text;
    while (!line.empty() && (line.back() == '\n' || line.back() == ' ')) {
        line.pop_back();
    }
    line = line.substr(0, 500);
    // names of the file are part of it, and may hold what a terminal obeys
    std::replace_if(line.begin(), line.end(), [](char c) { return (unsigned char) c < 0x20 || c == 0x7f; }, ' ');
    return line;
}

// Removes the name of the function that complains, which begins most of llama.cpp's lines.
std::string without_function(const std::string & line) {
    const size_t end = line.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_");
    return end != std::string::npos && line.compare(end, 2, ": ") == 0 ? line.substr(end + 2) : line;
}

void note_complaint(ggml_log_level level, const char * text, void * /*user_data*/) {
    if (level == GGML_LOG_LEVEL_ERROR && last_complaint.size() < 2000) {
        const std::string line = without_function(one_line(text));
        // The first line says what went wrong; later lines say what follows from it. A header may be read more than once.
        if (!line.empty() && last_complaint.find(line) == std::string::npos) {
            last_complaint += (last_complaint.empty() ? "" : "; ") + line;
        }
    }
}

[[noreturn]] void give_up(const std::string & message) {
    // what is wrong with a file begins with its name: a model may have several
    const bool named = message.compare(0, model_name.size(), model_name) == 0;
    fprintf(stderr, "error: %s%s%s\n", named ? "" : model_name.c_str(), named ? "" : ": ", message.c_str());
    fflush(stderr);
    _exit(EXIT_BAD_INPUT);
}

void on_abort(const char * text) {
    give_up("llama.cpp stops: " + one_line(text) + (last_complaint.empty() ? "" : " (" + last_complaint + ")"));
}

//
// the CPU backend
//

// Where llama.cpp's backends are separate libraries, only the CPU's is loaded, from beside ggml itself: a graph does not
// depend on it, and others would open their devices.
void load_cpu_backend() {
    if (ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)) {
        return;
    }
    Dl_info info;
    if (!dladdr((const void *) ggml_version, &info) || !info.dli_fname) {
        throw std::runtime_error("can't find the folder that ggml was loaded from");
    }
    namespace fs                 = std::filesystem;
    const fs::path        folder = fs::path(info.dli_fname).parent_path();
    std::vector<fs::path> found;
    for (const auto & entry : fs::directory_iterator(folder)) {
        if (entry.path().filename().string().rfind("libggml-cpu", 0) == 0 && entry.path().extension() == ".so") {
            found.push_back(entry.path());
        }
    }
    std::sort(found.begin(), found.end());
    for (const fs::path & path : found) {
        if (ggml_backend_load(path.c_str())) {
            return;
        }
    }
    throw std::runtime_error("no CPU backend of ggml (libggml-cpu*.so) in " + folder.string());
}

//
// the graph of a call without outputs
//

// llama.cpp reserves no such graph, and keeps to itself what it builds graphs by. An explicit instantiation may name a private member.
template <llm_graph_params llm_graph_result::* params> struct private_params {
    friend llm_graph_params llm_graph_result::* params_of_results() { return params; }
};

llm_graph_params llm_graph_result::* params_of_results();
template struct private_params<&llm_graph_result::params>;

// Builds the graph that was reserved last again, without outputs, as llama_decode builds it.
ggml_cgraph * build_without_outputs(const llama_model & model, const llama_context & context) {
    llm_graph_result * result = context.get_gf_res_reserve();
    llm_graph_params   params = result->*params_of_results();
    params.n_outputs          = 0;
    std::fill_n(params.ubatch.output, params.ubatch.n_tokens, 0);
    ggml_backend_sched_reset(context.get_sched());
    result->reset();
    ggml_cgraph * graph = model.build_graph(params);
    ggml_backend_sched_split_graph(context.get_sched(), graph);
    return graph;
}

//
// a context that keeps books of its cache, and computes nothing
//

struct cache_lengths {
    int64_t n_kv     = 0;  // cells that the graph reads; 0 when there is no KV cache
    int64_t n_kv_swa = 0;  // the same of the layers with a sliding window; 0 when there are none
};

// Returns the lengths of a memory that has them; of one that is not known here there are none.
cache_lengths lengths_of(const llama_memory_context_i * memory) {
    const auto of_window = [](const llama_kv_cache_iswa_context * c) -> cache_lengths {
        return { c->get_base()->get_n_kv(), c->get_swa()->get_n_kv() };
    };
    if (const auto * kv = dynamic_cast<const llama_kv_cache_context *>(memory)) {
        return { kv->get_n_kv(), 0 };
    }
    if (const auto * iswa = dynamic_cast<const llama_kv_cache_iswa_context *>(memory)) {
        return of_window(iswa);
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid_context *>(memory)) {
        return { hybrid->get_attn()->get_n_kv(), 0 };
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid_iswa_context *>(memory)) {
        return of_window(hybrid->get_attn());
    }
    if (const auto * dsa = dynamic_cast<const llama_kv_cache_dsa_context *>(memory)) {
        return { dsa->get_mla()->get_n_kv(), 0 };
    }
    if (const auto * dsa = dynamic_cast<const llama_kv_cache_dsa_iswa_context *>(memory)) {
        return { dsa->get_dsa()->get_mla()->get_n_kv(), dsa->get_swa()->get_n_kv() };
    }
    if (const auto * msa = dynamic_cast<const llama_kv_cache_msa_context *>(memory)) {
        return { msa->get_base()->get_n_kv(), 0 };
    }
    return {};
}

// Functions of llama.cpp that are private: an explicit instantiation may name them. It builds the graph of a context shift where it
// computes it, and those of encoders where it encodes.
using shift_builder = ggml_cgraph * (llama_kv_cache::*)(llm_graph_result *, llama_context *) const;
using params_getter = llm_graph_params (llama_context::*)(llm_graph_result *,
                                                          const llama_ubatch &,
                                                          const llama_memory_context_i *,
                                                          llm_graph_type) const;

shift_builder the_shift_builder();
params_getter the_params_getter();

template <shift_builder shift, params_getter params> struct private_functions {
    friend shift_builder the_shift_builder() { return shift; }

    friend params_getter the_params_getter() { return params; }
};

template struct private_functions<&llama_kv_cache::build_graph_shift, &llama_context::graph_params>;

// What an encoder has computed is a private member: a decoder attends to it.
template <llama_cross llama_context::* cross> struct private_cross {
    friend llama_cross llama_context::* cross_of_contexts() { return cross; }
};

llama_cross llama_context::* cross_of_contexts();
template struct private_cross<&llama_context::cross>;

// Returns the caches of a memory whose keys a context shift rotates; of one that is not known here none.
std::vector<const llama_kv_cache *> caches_of(const llama_memory_i * memory) {
    if (const auto * kv = dynamic_cast<const llama_kv_cache *>(memory)) {
        return { kv };
    }
    if (const auto * iswa = dynamic_cast<const llama_kv_cache_iswa *>(memory)) {
        return { iswa->get_base(), iswa->get_swa() };
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(memory)) {
        return { hybrid->get_mem_attn() };
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid_iswa *>(memory)) {
        return caches_of(hybrid->get_mem_attn());
    }
    return {};
}

struct free_model {
    void operator()(llama_model * m) const { llama_model_free(m); }
};

struct free_sampler {
    void operator()(llama_sampler * s) const { llama_sampler_free(s); }
};

struct free_context {
    void operator()(llama_context * c) const { llama_free(c); }
};

using model_ptr   = std::unique_ptr<llama_model, free_model>;
using context_ptr = std::unique_ptr<llama_context, free_context>;
using sampler_ptr = std::unique_ptr<llama_sampler, free_sampler>;

llama_sampler * make_sampler(const sampler_option & option, int32_t n_vocab) {
    const std::vector<double> & n = option.numbers;
    if (option.name == "logit_bias") {
        const std::vector<llama_logit_bias> biases((size_t) std::max(n[0], 0.0), { 0, 1.0f });
        return llama_sampler_init_logit_bias(n_vocab, (int32_t) biases.size(), biases.data());
    }
    return option.name == "greedy"  ? llama_sampler_init_greedy()
           : option.name == "dist"  ? llama_sampler_init_dist(0)
           : option.name == "top_k" ? llama_sampler_init_top_k((int32_t) n[0])
           : option.name == "top_p" ? llama_sampler_init_top_p((float) n[0], 0)
           : option.name == "min_p" ? llama_sampler_init_min_p((float) n[0], 0)
           : option.name == "penalties"
               ? llama_sampler_init_penalties(n_vocab, (int32_t) n[0], (float) n[1], (float) n[2], (float) n[3])
               : llama_sampler_init_temp_ext((float) n[0], (float) n[1], (float) n[2]);
}

// Loads a model without its weights. With more than one device llama.cpp splits its tensors over them.
model_ptr load_model(const std::vector<sparse_file> & files, uint32_t n_devices = 1, bool mtp = false) {
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
int layer_of(const std::string & name) {
    int layer = -1;
    return sscanf(name.c_str(), "blk.%d.", &layer) == 1 ? layer : -1;
}

// Gives the tensors the types that llama-quantize would give them.
void quantize(std::vector<sparse_file> & files, llama_ftype ftype) {
    const model_ptr             model  = load_model(files);
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype                       = ftype;
    std::unique_ptr<quantize_state_impl, decltype(&llama_quant_free)>    state(llama_quant_init(model.get(), &params),
                                                                               llama_quant_free);
    // types depend on the order, which is that of the layers
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

// Writes what the first line begins with, before the description of the model.
void begin_header(json_line & out) {
    out.begin_object();
    out.text("format", "neuron-kernelgen graphs");
    out.integer("version", GRAPH_FORMAT_VERSION);
    out.text("ggml", ggml_version());
    out.text("llama_cpp", llama_version());
    out.begin_object("model");
}

class model_graphs {
  public:
    // others  the files of the model's draft, or of the model whose draft this is; of one that is its own draft there are none
    model_graphs(const options &                  opts,
                 const std::vector<sparse_file> & files,
                 const std::vector<sparse_file> & others) :
        opts(opts), model(load_model(files, opts.n_devices, opts.spec_type == "draft-mtp")) {
        if (!others.empty()) {
            other = load_model(others, 1, opts.spec_type == "draft-mtp");
        }
        for (const auto * named : { &files, &others }) {
            for (const sparse_file & file : *named) {
                weights.insert(file.tensor_names().begin(), file.tensor_names().end());
            }
        }
        check_draft();
        for (const scaled_adapter & adapter : opts.adapters) {
            load_adapter(adapter);
        }
    }

    void write_header() const {
        char description[128] = "";
        llama_model_desc(model.get(), description, sizeof(description));
        char architecture[128] = "";
        llama_model_meta_val_str(model.get(), "general.architecture", architecture, sizeof(architecture));
        char name[128] = "";
        llama_model_meta_val_str(model.get(), "general.name", name, sizeof(name));

        json_line out;
        begin_header(out);
        out.text("architecture", architecture);
        out.text("name", name);
        out.text("description", description);
        out.integer("parameters", (int64_t) llama_model_n_params(model.get()));
        out.integer("bytes", (int64_t) llama_model_size(model.get()));
        out.integer("layers", llama_model_n_layer(model.get()));
        out.integer("context_length", llama_model_n_ctx_train(model.get()));
        out.boolean("encoder", llama_model_has_encoder(model.get()));
        out.boolean("decoder", llama_model_has_decoder(model.get()));
        out.boolean("recurrent", llama_model_is_recurrent(model.get()) || llama_model_is_hybrid(model.get()));
        out.end_object();
        out.end_object();
        out.print(stdout);
    }

    void open_context(bool flash_attn) {
        context.reset();
        target_context.reset();
        llama_context_params params = llama_context_default_params();
        params.n_ctx                = opts.n_ctx;
        params.n_batch              = opts.n_ubatch;
        params.n_ubatch             = opts.n_ubatch;
        params.n_seq_max            = opts.n_seq_max;
        params.type_k               = opts.type_k;
        params.type_v               = opts.type_v;
        params.flash_attn_type      = flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        params.kv_unified           = opts.kv_unified;
        params.swa_full             = opts.swa_full;
        params.embeddings           = opts.embeddings;
        params.pooling_type         = (enum llama_pooling_type) opts.pooling;
        params.no_perf              = true;
        params.n_threads            = 1;
        params.n_threads_batch      = 1;
        params.n_rs_seq             = opts.draft ? 0 : opts.draft_n_max;
        if (opts.draft) {
            // the tables and the cache of the model that it drafts for may be the draft's, too
            llama_model & target = other ? *other : *model;
            target_context.reset(llama_init_from_model(&target, params));
            if (!target_context) {
                throw std::runtime_error("llama.cpp can't make a context of the draft's model: " + last_complaint);
            }
            params.ctx_other = target_context.get();
            params.ctx_type  = opts.spec_type == "draft-mtp" ? LLAMA_CONTEXT_TYPE_MTP : LLAMA_CONTEXT_TYPE_DEFAULT;
        }
        // as llama.cpp's programs do: a chain for each sequence
        std::vector<llama_sampler_seq_config> configs;
        samplers.clear();
        for (uint32_t s = 0; s < opts.n_seq_max && !opts.samplers.empty(); s++) {
            samplers.emplace_back(llama_sampler_chain_init(llama_sampler_chain_default_params()));
            for (const sampler_option & option : opts.samplers) {
                const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
                llama_sampler_chain_add(samplers.back().get(), make_sampler(option, n_vocab));
            }
            configs.push_back({ (llama_seq_id) s, samplers.back().get() });
        }
        if (!configs.empty()) {
            params.samplers              = configs.data();
            params.n_samplers            = configs.size();
            params.n_outputs_max_per_seq = 1;
            for (const graph_size & size : opts.graphs) {
                const uint32_t per_seq       = (size.n_outputs + size.n_seqs - 1) / size.n_seqs;
                params.n_outputs_max_per_seq = std::max(params.n_outputs_max_per_seq, per_seq);
            }
        }
        context.reset(llama_init_from_model(model.get(), params));
        if (!context) {
            throw std::runtime_error("llama.cpp can't make a context: " + last_complaint);
        }
        give_hidden_states();
        if (llama_set_adapters_lora(context.get(), adapters.data(), adapters.size(), scales.data()) != 0) {
            throw std::runtime_error("llama.cpp can't use the adapters: " + last_complaint);
        }
        if (opts.control_vector) {
            // values, which graphs do not depend on, begin with those of layer 1
            const int32_t            n_embd  = llama_model_n_embd(model.get());
            const int32_t            n_layer = llama_model_n_layer(model.get());
            const std::vector<float> values((size_t) n_embd * (size_t) n_layer);
            if (llama_set_adapter_cvec(context.get(), values.data(), values.size(), n_embd, 1, n_layer) != 0) {
                throw std::runtime_error("llama.cpp can't use a control vector: " + last_complaint);
            }
        }
        // some models can't have it, and llama.cpp then goes on with the other
        this->flash_attn = context->get_cparams().flash_attn;
    }

    // Writes the graph of one call with the sizes asked for.
    void write_graph(const graph_size & size) {
        const uint32_t n_seqs = n_seqs_of(size);
        if (size.n_tokens > context->n_ubatch()) {
            throw std::runtime_error("n_tokens is " + std::to_string(size.n_tokens) + ", and a call has at most " +
                                     std::to_string(context->n_ubatch()) + " (--ubatch-size)");
        }
        if (opts.encoder) {
            write_devices(encoder_graph(size), [&](json_line & out) {
                out.integer("n_tokens", size.n_tokens);
                out.integer("n_outputs", size.n_tokens);
                out.integer("n_seqs", size.n_seqs);
            });
            return;
        }
        if (opts.n_encoded && has_both()) {
            llama_cross & cross = context.get()->*cross_of_contexts();
            cross.n_embd        = llama_model_n_embd(model.get());
            cross.n_enc         = opts.n_encoded;
            cross.v_embd.resize(1);  // llama.cpp looks whether there is any
        }
        std::unique_ptr<llama_batch_allocr> batch;
        llama_memory_context_ptr            memory_context;
        if (llama_memory_t memory = memory_of_calls()) {
            memory->clear(false);
            batch           = std::make_unique<llama_batch_allocr>(model->hparams.n_pos_per_embd());
            const bool all  = size.n_outputs == size.n_tokens;
            uint32_t   left = tokens_before(size);
            for (uint32_t most = std::max(1u, context->n_ubatch() / n_seqs); left > 0;) {
                const uint32_t step = std::min(left, most);
                next_call(*memory, *batch, step, n_seqs, false);
                left -= step;
            }
            memory_context = next_call(*memory, *batch, size.n_tokens / n_seqs, n_seqs, all);
        }
        ggml_cgraph * graph =
            context->graph_reserve(size.n_tokens, n_seqs, std::max(1u, size.n_outputs), memory_context.get(), true);
        if (!graph) {
            throw std::runtime_error("llama.cpp can't build the graph: " + last_complaint);
        }
        if (!size.n_outputs) {
            graph = build_without_outputs(*model, *context);
        }
        const cache_lengths lengths = lengths_of(memory_context.get());

        write_devices(graph, [&](json_line & out) {
            out.integer("n_tokens", size.n_tokens);
            out.integer("n_outputs", size.n_outputs);
            out.integer("n_seqs", n_seqs);
            if (lengths.n_kv) {
                out.integer("n_kv", lengths.n_kv);
            }
            if (lengths.n_kv_swa) {
                out.integer("n_kv_swa", lengths.n_kv_swa);
            }
        });
    }

    // Writes the graphs that shift the positions of the keys in the cache; none where the model has no such graph.
    void write_shifts() {
        const llama_memory_t memory = context->get_memory();
        if (!memory || !memory->get_can_shift() || model->hparams.rope_type == LLAMA_ROPE_TYPE_NONE) {
            return;
        }
        for (const llama_kv_cache * cache : caches_of(memory)) {
            llm_graph_result * built = context->get_gf_res_reserve();
            built->reset();
            ggml_backend_sched_reset(context->get_sched());
            if (ggml_is_quantized(opts.type_k) && !cache->build_input_k_rot(built->get_ctx())) {
                throw std::runtime_error(
                    "llama.cpp crashes when it shifts a quantized cache of keys of a model whose heads are not "
                    "multiples of 64: have the keys in f16");
            }
            ggml_cgraph * graph = (cache->*the_shift_builder())(built, context.get());
            if (ggml_graph_n_nodes(graph) == 0) {
                continue;
            }
            if (opts.split_tensors) {
                ggml_backend_sched_split_graph(context->get_sched(), graph);
            }
            write_devices(graph,
                          [&](json_line & out) { out.integer("n_cells", cache->get_size() * cache->get_n_stream()); });
        }
    }

    // Writes the ops of which llama.cpp asks a device, before it samples there, whether it computes them: those of each sampler by
    // itself, of candidates that are numbered. In a call the first sampler has all tokens, without numbers.
    void write_probe() const {
        const int32_t          n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
        const ggml_init_params params  = { ggml_tensor_overhead() * GGML_DEFAULT_GRAPH_SIZE + ggml_graph_overhead(),
                                           /*.mem_buffer =*/nullptr, /*.no_alloc =*/true };
        ggml_context_ptr       ctx(ggml_init(params));
        ggml_cgraph *          graph  = ggml_new_graph(ctx.get());
        llama_sampler_data     chosen = { ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n_vocab), nullptr, nullptr,
                                          nullptr };
        for (int i = 0; i < llama_sampler_chain_n(samplers.front().get()); i++) {
            llama_sampler * sampler = llama_sampler_chain_get(samplers.front().get(), i);
            const int64_t   n       = ggml_nelements(chosen.logits);
            const auto      apply   = [&](llama_sampler_data & data) {
                if (sampler->iface->backend_reset) {
                    sampler->iface->backend_reset(sampler);
                }
                sampler->iface->backend_apply(sampler, ctx.get(), graph, &data);
            };
            llama_sampler_data asked = { ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n), nullptr, nullptr,
                                         ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, n) };
            apply(asked);
            for (ggml_tensor * result : { asked.logits, asked.probs, asked.sampled, asked.candidates }) {
                if (result) {
                    ggml_build_forward_expand(graph, result);
                }
            }
            apply(chosen);
        }
        json_line tensors;
        tensors.begin_array("tensors");
        graph_writer(tensors, [this](const ggml_tensor * t) { return role_of(t); }).write(graph);
        tensors.end_array();
        json_line out;
        out.begin_object();
        out.begin_object("sizes");
        out.end_object();
        out.begin_object("context");
        out.text("samplers", opts.chain.c_str());
        out.boolean("probe", true);
        out.end_object();
        out.append(tensors);
        out.end_object();
        out.print(stdout);
    }

  private:
    bool has_both() const { return llama_model_has_encoder(model.get()) && llama_model_has_decoder(model.get()); }

    // Returns the memory that calls use; NULL where they have none. llama.cpp makes one for an encoder alone, too, and encodes without it.
    llama_memory_t memory_of_calls() const {
        return llama_model_has_encoder(model.get()) && !has_both() ? nullptr : context->get_memory();
    }

    // Returns the sequences of a call. Without a cache these are rows of what is pooled alone, and a kernel for more serves fewer: they are
    // as many as there can be.
    uint32_t n_seqs_of(const graph_size & size) const {
        if (memory_of_calls() || !opts.embeddings) {
            return size.n_seqs;
        }
        uint32_t n = std::min<uint32_t>(size.n_tokens, LLAMA_MAX_SEQ);
        while (size.n_tokens % n != 0) {
            n--;
        }
        return n;
    }

    // The draft of a model that has one.
    const llama_model & draft_model() const { return opts.draft || !other ? *model : *other; }

    // llama.cpp ends the program where a file has another architecture than it expects.
    void check_draft() const {
        if (opts.spec_type == "draft-mtp" && llama_model_n_layer_nextn(&draft_model()) == 0) {
            throw std::runtime_error("the model has no MTP layers (--spec-type draft-mtp)");
        }
        if (opts.spec_type == "draft-eagle3" && draft_model().arch != LLM_ARCH_EAGLE3) {
            throw std::runtime_error("the draft's architecture is not eagle3 (--spec-type draft-eagle3)");
        }
    }

    // Has the context give the hidden states that a draft reads, as llama.cpp's speculative decoding does: of the model those of all
    // tokens, of the draft those of outputs.
    void give_hidden_states() {
        if (opts.spec_type == "draft-mtp" || (opts.draft && !opts.spec_type.empty())) {
            llama_set_embeddings_nextn(context.get(), true, /*masked=*/opts.draft);
            return;
        }
        if (opts.spec_type.empty()) {
            return;
        }
        const int32_t * layers = llama_model_target_layer_ids(&draft_model());
        for (uint32_t i = 0; i < llama_model_target_layer_ids_n(&draft_model()); i++) {
            const int32_t n_layer = llama_model_n_layer(model.get());
            if (layers[i] < 0 || layers[i] > n_layer) {
                throw std::runtime_error("the draft reads layer " + std::to_string(layers[i]) + " of a model of " +
                                         std::to_string(n_layer));
            }
            if (layers[i] < n_layer) {
                llama_set_embeddings_layer_inp(context.get(), (uint32_t) layers[i], true);
            } else {
                llama_set_embeddings_nextn(context.get(), true, /*masked=*/false);
            }
        }
    }

    // Builds the graph by which llama_encode computes so many tokens.
    ggml_cgraph * encoder_graph(const graph_size & size) {
        if (!has_both()) {
            throw std::runtime_error("the model has not both an encoder and a decoder (--encoder)");
        }
        llama_batch_allocr batch(model->hparams.n_pos_per_embd());
        const llama_ubatch calls = batch.ubatch_reserve(size.n_tokens / size.n_seqs, size.n_seqs);
        llm_graph_result * built = context->get_gf_res_reserve();
        llm_graph_params params  = (context.get()->*the_params_getter())(built, calls, nullptr, LLM_GRAPH_TYPE_ENCODER);
        params.n_outputs         = size.n_tokens;
        built->reset();
        ggml_backend_sched_reset(context->get_sched());
        ggml_cgraph * graph = model->build_graph(params);
        if (opts.split_tensors) {
            ggml_backend_sched_split_graph(context->get_sched(), graph);
        }
        return graph;
    }

    // Writes what each device computes of a graph.
    //
    // sizes  writes the sizes that the graph is of
    template <typename F> void write_devices(ggml_cgraph * graph, F sizes) {
        if (!opts.split_tensors) {
            json_line tensors;
            tensors.begin_array("tensors");
            graph_writer(tensors, [this](const ggml_tensor * t) { return role_of(t); }).write(graph);
            tensors.end_array();
            write_line(sizes, tensors, {});
            return;
        }
        // what devices compute alike is written once
        const auto &                                        steps = splitter.split(context->get_sched(), graph);
        std::vector<std::pair<json_line, std::vector<int>>> different;
        for (size_t j = 0; j < steps.size(); j++) {
            json_line tensors = write_steps(steps[j]);
            auto      equal   = std::find_if(different.begin(), different.end(), [&tensors](const auto & other) {
                return other.first.written() == tensors.written();
            });
            if (equal == different.end()) {
                equal = different.insert(equal, { std::move(tensors), {} });
            }
            equal->second.push_back((int) j);
        }
        for (const auto & [tensors, devices] : different) {
            write_line(sizes, tensors, devices);
        }
    }

    // Reads the header of an adapter; what follows is zeros to llama.cpp, as far as the header says.
    void load_adapter(const scaled_adapter & adapter) {
        model_name = adapter.file;
        const sparse_file    file(adapter.file);
        llama_adapter_lora * loaded = llama_adapter_lora_init(model.get(), file.path().c_str());
        if (!loaded) {
            throw std::runtime_error("llama.cpp can't load the adapter: " + last_complaint);
        }
        model_name = opts.model;
        adapters.push_back(loaded);
        scales.push_back(adapter.scale);
        weights.insert(file.tensor_names().begin(), file.tensor_names().end());
    }

    json_line write_steps(const std::vector<device_step> & steps) const {
        json_line tensors;
        tensors.begin_array("tensors");
        graph_writer writer(tensors, role_on_device);
        for (const device_step & step : steps) {
            if (step.part) {
                writer.write(step.part);
            } else {
                writer.write_all_reduce(step.sum, (int) opts.n_devices);
            }
        }
        tensors.end_array();
        return tensors;
    }

    template <typename F> void write_line(F sizes, const json_line & tensors, const std::vector<int> & devices) const {
        json_line out;
        out.begin_object();
        out.begin_object("sizes");
        sizes(out);
        out.end_object();
        out.begin_object("context");
        out.integer("n_ctx", context->n_ctx());
        out.integer("n_ubatch", context->n_ubatch());
        out.integer("n_seq_max", context->n_seq_max());
        out.boolean("flash_attn", flash_attn);
        out.boolean("kv_unified", context->get_cparams().kv_unified);
        out.text("type_k", ggml_type_name(opts.type_k));
        out.text("type_v", ggml_type_name(opts.type_v));
        if (!opts.samplers.empty()) {
            out.text("samplers", opts.chain.c_str());
        }
        out.end_object();
        if (!devices.empty()) {
            out.begin_object("split");
            out.text("mode", "tensor");
            out.integer("devices", opts.n_devices);
            out.begin_array("of");
            for (const int device : devices) {
                out.number(device);
            }
            out.end_array();
            out.end_object();
        }
        out.append(tensors);
        out.end_object();
        out.print(stdout);
    }

    const char * role_of(const ggml_tensor * t) const {
        if (t->flags & GGML_TENSOR_FLAG_INPUT) {
            return "input";
        }
        if (t->flags & GGML_TENSOR_FLAG_OUTPUT) {
            return "output";
        }
        if (t->op != GGML_OP_NONE || t->view_src) {
            return nullptr;
        }
        return weights.count(t->name) ? "weight" : "cache";
    }

    // Returns how many tokens each sequence must have in the cache for the graph to read n_kv cells of it.
    uint32_t tokens_before(const graph_size & size) const {
        if (!size.n_kv) {
            return 0;
        }
        // sequences have a cache each, unless it is unified
        const uint32_t share = context->get_cparams().kv_unified ? size.n_kv / size.n_seqs : size.n_kv;
        const uint32_t own   = size.n_tokens / size.n_seqs;
        if (share < own || share > context->n_ctx_seq()) {
            throw std::runtime_error("a cache of " + std::to_string(size.n_kv) + " cells is not one that " +
                                     std::to_string(own) + " tokens of each of " + std::to_string(size.n_seqs) +
                                     " sequences meet in a context of " + std::to_string(context->n_ctx()));
        }
        return share - own;
    }

    // Does what llama_decode does before a graph is built: finds cells for the tokens, and notes that they are taken.
    llama_memory_context_ptr next_call(llama_memory_i &     memory,
                                       llama_batch_allocr & batch,
                                       uint32_t             n_tokens,
                                       uint32_t             n_seqs,
                                       bool                 all_outputs) const {
        llama_batch_ext tokens(context.get());
        for (uint32_t s = 0; s < n_seqs; s++) {
            const llama_pos first = memory.seq_pos_max((llama_seq_id) s) + 1;
            for (uint32_t i = 0; i < n_tokens; i++) {
                const int32_t   index                    = tokens.add_token((llama_seq_id) s);
                const llama_pos pos[GGML_MROPE_SECTIONS] = { first + (llama_pos) i, first + (llama_pos) i,
                                                             first + (llama_pos) i, 0 };
                tokens.set_token_id(index, 0);
                tokens.set_token_pos(index, pos);
                tokens.set_output(index, all_outputs || i + 1 == n_tokens);
            }
        }
        if (!batch.init(tokens, *llama_model_get_vocab(model.get()), all_outputs)) {
            throw std::runtime_error("llama.cpp refuses the tokens: " + last_complaint);
        }
        auto found = memory.init_batch(batch, context->n_ubatch(), all_outputs);
        if (!found || found->get_status() != LLAMA_MEMORY_STATUS_SUCCESS || !found->apply()) {
            throw std::runtime_error("llama.cpp finds no place in its cache for " + std::to_string(n_tokens * n_seqs) +
                                     " tokens: " + last_complaint);
        }
        return found;
    }

    const options &                   opts;
    std::unordered_set<std::string>   weights;
    model_ptr                         model;
    model_ptr                         other;     // the draft of the model, or the model of the draft
    std::vector<llama_adapter_lora *> adapters;  // the model's
    std::vector<float>                scales;
    std::vector<sampler_ptr>          samplers;
    context_ptr                       target_context;  // which the draft's refers to
    context_ptr                       context;
    bool                              flash_attn = false;
    graph_splitter                    splitter;
};

//
// the graphs of a projector
//

std::string text_of(const gguf_context * header, const char * key) {
    const int64_t id = gguf_find_key(header, key);
    return id >= 0 && gguf_get_kv_type(header, id) == GGUF_TYPE_STRING ? gguf_get_val_str(header, id) : "";
}

struct projector_file {
    sparse_file      file;
    ggml_context_ptr tensors;
    gguf_context_ptr header;

    explicit projector_file(const std::string & path) : file(path, /*with_numbers =*/true) {
        ggml_context * context = nullptr;
        header.reset(gguf_init_from_file(file.path().c_str(), { /*.no_alloc =*/true, /*.ctx =*/&context }));
        tensors.reset(context);
        if (!header) {
            throw std::runtime_error("the header can't be read again");
        }
        const std::string architecture = text_of(header.get(), "general.architecture");
        if (architecture != "clip") {
            throw std::runtime_error("this is not a projector: its architecture is " +
                                     (architecture.empty() ? "not named" : architecture));
        }
    }

    std::unique_ptr<projector> load(const options & opts, bool flash_attn) const {
        try {
            return std::make_unique<projector>(file.path(), flash_attn, opts.image_min_tokens, opts.image_max_tokens);
        } catch (const std::runtime_error & error) {
            // a complaint names the file as it is read here
            std::string said = last_complaint.empty() ? error.what() : last_complaint;
            for (size_t at; (at = said.find(file.path())) != std::string::npos;) {
                said.replace(at, file.path().size(), "the file");
            }
            throw std::runtime_error("llama.cpp can't load the projector: " + said);
        }
    }
};

void write_projector_header(const projector_file & file, const projector & loaded) {
    int64_t        parameters = 0;
    int64_t        bytes      = 0;
    ggml_context * context    = file.tensors.get();
    for (ggml_tensor * t = ggml_get_first_tensor(context); t; t = ggml_get_next_tensor(context, t)) {
        parameters += ggml_nelements(t);
        bytes += (int64_t) ggml_nbytes(t);
    }
    std::string types;
    int         layers = 0;
    for (const projector_part & part : loaded.parts()) {
        types += (types.empty() ? "" : ", ") + part.type;
        layers += part.layers;
    }
    json_line out;
    begin_header(out);
    out.text("architecture", text_of(file.header.get(), "general.architecture").c_str());
    out.text("name", text_of(file.header.get(), "general.name").c_str());
    out.text("description", types.c_str());
    out.integer("parameters", parameters);
    out.integer("bytes", bytes);
    out.integer("layers", layers);
    out.integer("context_length", 0);
    out.boolean("encoder", true);
    out.boolean("decoder", false);
    out.boolean("recurrent", false);
    out.end_object();
    out.end_object();
    out.print(stdout);
}

// Writes one graph. Tensors that are neither weights nor computed are set before a call.
void write_projector_graph(const std::unordered_set<std::string> & weights,
                           const projector_call &                  call,
                           bool                                    flash_attn,
                           ggml_cgraph *                           graph) {
    json_line out;
    out.begin_object();
    out.begin_object("sizes");
    out.integer(call.audio ? "frames" : "width", call.size.width);
    out.integer(call.audio ? "frame_size" : "height", call.size.height);
    if (!call.audio) {
        out.integer("n_images", (int64_t) call.n_images);
    }
    out.end_object();
    out.begin_object("context");
    out.boolean("flash_attn", flash_attn);
    out.boolean("projector", true);
    out.end_object();
    json_line tensors;
    tensors.begin_array("tensors");
    const ggml_tensor * last = ggml_graph_node(graph, -1);
    graph_writer(tensors, [&](const ggml_tensor * t) -> const char * {
        return t->flags & GGML_TENSOR_FLAG_INPUT                 ? "input"
               : t->flags & GGML_TENSOR_FLAG_OUTPUT || t == last ? "output"
               : t->op != GGML_OP_NONE || t->view_src            ? nullptr
               : weights.count(t->name)                          ? "weight"
                                                                 : "input";
    }).write(graph);
    tensors.end_array();
    out.append(tensors);
    out.end_object();
    out.print(stdout);
}

//
// the program
//

// Returns whether a version that is loaded is the one this program was built for; a development version has a suffix.
bool same_version(const std::string & loaded, const std::string & built_for) {
    return loaded.compare(0, built_for.size(), built_for) == 0 &&
           (loaded.size() == built_for.size() || loaded[built_for.size()] == '-');
}

void check_versions() {
    if (!same_version(ggml_version(), EXPORTER_GGML_VERSION) ||
        !same_version(llama_version(), EXPORTER_LLAMA_VERSION)) {
        throw std::runtime_error(std::string("this program was built for llama.cpp " EXPORTER_LLAMA_VERSION
                                             " with ggml " EXPORTER_GGML_VERSION " and has loaded llama.cpp ") +
                                 llama_version() + " with ggml " + ggml_version() + ": build it again");
    }
}

// Opens a model's files. The reason why gguf refuses one is what it logs.
std::vector<sparse_file> open_files(const std::string & path) {
    try {
        std::vector<sparse_file> files = open_model_files(path);
        last_complaint.clear();
        return files;
    } catch (const std::runtime_error & error) {
        throw std::runtime_error(error.what() + (last_complaint.empty() ? "" : ": " + last_complaint));
    }
}

void export_projector(const options & opts) {
    const projector_file                  file(opts.mmproj);
    const std::vector<std::string> &      names = file.file.tensor_names();
    const std::unordered_set<std::string> weights(names.begin(), names.end());
    for (const bool flash_attn : opts.flash_attn) {
        const std::unique_ptr<projector> loaded = file.load(opts, flash_attn);
        if (flash_attn == opts.flash_attn.front()) {
            write_projector_header(file, *loaded);
        }
        loaded->graphs(opts.images, opts.seconds, [&](const projector_call & call, ggml_cgraph * graph) {
            write_projector_graph(weights, call, flash_attn, graph);
        });
    }
}

void export_model(const options & opts) {
    std::vector<sparse_file> files = open_files(opts.model);
    if (opts.ftype >= 0) {
        quantize(files, (llama_ftype) opts.ftype);
    }
    std::vector<sparse_file> others;
    if (!opts.model_draft.empty()) {
        model_name = opts.model_draft;
        others     = open_files(opts.model_draft);
        model_name = opts.model;
    }
    if (opts.draft && !others.empty()) {
        std::swap(files, others);
    }
    model_graphs graphs(opts, files, others);
    graphs.write_header();
    if (opts.shift) {
        graphs.open_context(opts.flash_attn.front());
        graphs.write_shifts();
    }
    for (const bool flash_attn : opts.flash_attn) {
        if (opts.graphs.empty()) {
            break;
        }
        graphs.open_context(flash_attn);
        for (const graph_size & size : opts.graphs) {
            graphs.write_graph(size);
        }
    }
    if (!opts.samplers.empty()) {
        graphs.write_probe();
    }
}

void export_graphs(const options & opts) {
    check_versions();
    load_cpu_backend();
    if (opts.mmproj.empty()) {
        export_model(opts);
    } else {
        export_projector(opts);
    }
    if (fflush(stdout) != 0 || ferror(stdout)) {
        throw std::runtime_error(std::string("can't write the graphs: ") + strerror(errno));
    }
}

void limit(int resource, rlim_t most) {
    rlimit current;
    if (getrlimit(resource, &current) == 0) {
        current.rlim_cur = std::min(most, current.rlim_max);
        setrlimit(resource, &current);
    }
}

[[noreturn]] void run_child(const options & opts, const std::string & file, pid_t parent) {
    model_name = file;
    // who ends the parent means the work
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) {
        _exit(EXIT_BAD_INPUT);
    }
#ifndef __SANITIZE_ADDRESS__  // which takes terabytes of addresses for its own books
    limit(RLIMIT_AS, MAX_ADDRESS_SPACE + (opts.split_tensors ? opts.n_devices * ADDRESS_SPACE_OF_DEVICE : 0));
#endif
    limit(RLIMIT_CPU, MAX_CPU_SECONDS);
    limit(RLIMIT_CORE, 0);
    ggml_log_set(note_complaint, nullptr);
    llama_log_set(note_complaint, nullptr);
    projector::log_to(note_complaint);
    ggml_set_abort_callback(on_abort);
    try {
        export_graphs(opts);
    } catch (const std::bad_alloc &) {
        give_up("the model asks for more memory than " + std::to_string(MAX_ADDRESS_SPACE >> 30) + " GiB");
    } catch (const std::exception & error) {
        give_up(error.what());
    }
    // not exit(): what llama.cpp would tidy up dies with the process
    _exit(0);
}

}  // namespace

int main(int argc, char ** argv) {
    options     opts;
    std::string mistake;
    if (!parse_options(argc, argv, opts, mistake)) {
        if (mistake.empty()) {
            printf("%s", usage());
            return 0;
        }
        fprintf(stderr, "error: %s\n%s", mistake.c_str(), usage());
        return EXIT_BAD_INPUT;
    }
    if (opts.version) {
        printf("export-graphs format %d, for llama.cpp %s with ggml %s\n", GRAPH_FORMAT_VERSION, EXPORTER_LLAMA_VERSION,
               EXPORTER_GGML_VERSION);
        return 0;
    }
    const std::string file   = opts.mmproj.empty() ? opts.model : opts.mmproj;
    const pid_t       parent = getpid();
    const pid_t       child  = fork();
    if (child < 0) {
        perror("error: fork");
        return 1;
    }
    if (child == 0) {
        run_child(opts, file, parent);
    }
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    if (WIFSIGNALED(status)) {
        fprintf(stderr, "error: %s: llama.cpp crashes on this model (%s): the file is damaged, or made to do harm\n",
                file.c_str(), strsignal(WTERMSIG(status)));
        return EXIT_BAD_INPUT;
    }
    const int code = WEXITSTATUS(status);
    if (code != 0 && code != EXIT_BAD_INPUT) {
        fprintf(stderr, "error: %s: llama.cpp ends the program with exit status %d\n", file.c_str(), code);
        return EXIT_BAD_INPUT;
    }
    return code;
}
