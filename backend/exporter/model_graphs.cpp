#include "model_graphs.h"

#include "../graph/graph_writer.h"
#include "complaints.h"
#include "ggml-cpp.h"
#include "header_line.h"
#include "llama-batch.h"
#include "llama-ext.h"
#include "llama_internals.h"
#include "model_context.h"
#include "split_devices.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace {

class model_graphs {
  public:
    model_graphs(const options &                  opts,
                 const std::vector<sparse_file> & files,
                 const std::vector<sparse_file> & others) : in(opts, files, others) {}

    void open_context(bool flash_attn) { in.open(flash_attn); }

    void write_header() const {
        char description[128] = "";
        llama_model_desc(in.model.get(), description, sizeof(description));
        char architecture[128] = "";
        llama_model_meta_val_str(in.model.get(), "general.architecture", architecture, sizeof(architecture));
        char name[128] = "";
        llama_model_meta_val_str(in.model.get(), "general.name", name, sizeof(name));

        json_line out;
        begin_header(out);
        out.text("architecture", architecture);
        out.text("name", name);
        out.text("description", description);
        out.integer("parameters", (int64_t) llama_model_n_params(in.model.get()));
        out.integer("bytes", (int64_t) llama_model_size(in.model.get()));
        out.integer("layers", llama_model_n_layer(in.model.get()));
        out.integer("context_length", llama_model_n_ctx_train(in.model.get()));
        out.boolean("encoder", llama_model_has_encoder(in.model.get()));
        out.boolean("decoder", llama_model_has_decoder(in.model.get()));
        out.boolean("recurrent", in.is_recurrent());
        out.end_object();
        out.end_object();
        out.print(stdout);
    }

    // Writes the graph of one call of the given sizes.
    void write_graph(const graph_size & size) {
        const uint32_t n_seqs = n_seqs_of(size);
        if (size.n_tokens > in.context->n_ubatch()) {
            throw std::runtime_error("n_tokens is " + std::to_string(size.n_tokens) + ", and a call has at most " +
                                     std::to_string(in.context->n_ubatch()) + " (--ubatch-size)");
        }
        if (in.opts.encoder) {
            write_devices(encoder_graph(size), [&](json_line & out) {
                out.integer("n_tokens", size.n_tokens);
                out.integer("n_outputs", size.n_tokens);
                out.integer("n_seqs", size.n_seqs);
            });
            return;
        }
        if (in.opts.n_encoded && in.has_both()) {
            llama_cross & cross = cross_of(*in.context);
            cross.n_embd        = llama_model_n_embd(in.model.get());
            cross.n_enc         = in.opts.n_encoded;
            cross.v_embd.resize(1);  // llama.cpp tests whether it is empty
        }
        std::unique_ptr<llama_batch_allocr> batch;
        llama_memory_context_ptr            memory_context;
        if (llama_memory_t memory = in.memory_of_calls()) {
            llama_memory_t cells = in.shares_cells() ? in.target->get_memory() : memory;
            cells->clear(false);
            batch           = std::make_unique<llama_batch_allocr>(in.model->hparams.n_pos_per_embd());
            const bool all  = size.n_outputs == size.n_tokens;
            uint32_t   left = tokens_before(size, n_seqs);
            for (uint32_t most = std::max(1u, in.context->n_ubatch() / n_seqs); left > 0;) {
                const uint32_t step = std::min(left, most);
                next_call(*cells, *batch, step, n_seqs, false);
                left -= step;
            }
            memory_context = next_call(*memory, *batch, size.n_tokens / n_seqs, n_seqs, all);
        }
        ggml_cgraph * graph =
            in.context->graph_reserve(size.n_tokens, n_seqs, std::max(1u, size.n_outputs), memory_context.get(), true);
        if (!graph) {
            throw std::runtime_error("llama.cpp can't build the graph: " + last_complaint);
        }
        if (!size.n_outputs) {
            graph = build_without_outputs(*in.model, *in.context);
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

    // Writes the graphs that shift the positions of the keys in the cache, if the model has such graphs.
    void write_shifts() {
        const llama_memory_t memory = in.context->get_memory();
        if (!memory || !memory->get_can_shift() || in.model->hparams.rope_type == LLAMA_ROPE_TYPE_NONE) {
            return;
        }
        for (const llama_kv_cache * cache : caches_of(memory)) {
            llm_graph_result * built = in.context->get_gf_res_reserve();
            built->reset();
            ggml_backend_sched_reset(in.context->get_sched());
            if (ggml_is_quantized(in.type_k) && !cache->build_input_k_rot(built->get_ctx())) {
                throw std::runtime_error(
                    "llama.cpp crashes when it shifts a quantized cache of keys of a model whose heads are not "
                    "multiples of 64: have the keys in f16");
            }
            ggml_cgraph * graph = build_shift(*cache, *built, *in.context);
            if (ggml_graph_n_nodes(graph) == 0) {
                continue;
            }
            if (in.opts.split_tensors) {
                ggml_backend_sched_split_graph(in.context->get_sched(), graph);
            }
            write_devices(graph,
                          [&](json_line & out) { out.integer("n_cells", cache->get_size() * cache->get_n_stream()); });
        }
    }

    // Writes the ops with which llama.cpp calls supports_op before it samples on a device: the ops of each sampler alone, with
    // numbered candidates. In a call, the first sampler gets all tokens, without numbers.
    void write_probe() const {
        const int32_t          n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(in.model.get()));
        const ggml_init_params params  = { ggml_tensor_overhead() * GGML_DEFAULT_GRAPH_SIZE + ggml_graph_overhead(),
                                           /*.mem_buffer =*/nullptr, /*.no_alloc =*/true };
        ggml_context_ptr       ctx(ggml_init(params));
        ggml_cgraph *          graph  = ggml_new_graph(ctx.get());
        llama_sampler_data     chosen = { ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n_vocab), nullptr, nullptr,
                                          nullptr };
        for (int i = 0; i < llama_sampler_chain_n(in.samplers.front().get()); i++) {
            llama_sampler * sampler = llama_sampler_chain_get(in.samplers.front().get(), i);
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
        out.text("samplers", in.opts.chain.c_str());
        out.boolean("probe", true);
        out.end_object();
        out.append(tensors);
        out.end_object();
        out.print(stdout);
    }

  private:
    // Returns the number of sequences of a call. Without a cache, sequences are only rows of the pooled result, and a kernel for
    // more rows also computes fewer, so this returns the largest number. For embeddings of a recurrent model, llama.cpp makes a
    // call for each sequence.
    uint32_t n_seqs_of(const graph_size & size) const {
        if (in.opts.embeddings && in.is_recurrent()) {
            return 1;
        }
        if (in.memory_of_calls() || !in.opts.embeddings) {
            return size.n_seqs;
        }
        uint32_t n = std::min<uint32_t>(size.n_tokens, LLAMA_MAX_SEQ);
        while (size.n_tokens % n != 0) {
            n--;
        }
        return n;
    }

    // Builds the graph that llama_encode computes for this number of tokens.
    ggml_cgraph * encoder_graph(const graph_size & size) {
        if (!in.has_both()) {
            throw std::runtime_error("the model has not both an encoder and a decoder (--encoder)");
        }
        llama_batch_allocr batch(in.model->hparams.n_pos_per_embd());
        const llama_ubatch calls  = batch.ubatch_reserve(size.n_tokens / size.n_seqs, size.n_seqs);
        llm_graph_result * built  = in.context->get_gf_res_reserve();
        llm_graph_params   params = encoder_params(*in.context, *built, calls);
        params.n_outputs          = size.n_tokens;
        built->reset();
        ggml_backend_sched_reset(in.context->get_sched());
        ggml_cgraph * graph = in.model->build_graph(params);
        if (in.opts.split_tensors) {
            ggml_backend_sched_split_graph(in.context->get_sched(), graph);
        }
        return graph;
    }

    // Writes each device's part of a graph.
    //
    // sizes  writes the sizes of the graph's call
    template <typename F> void write_devices(ggml_cgraph * graph, F sizes) {
        if (!in.opts.split_tensors) {
            json_line tensors;
            tensors.begin_array("tensors");
            graph_writer(tensors, [this](const ggml_tensor * t) { return role_of(t); }).write(graph);
            tensors.end_array();
            write_line(sizes, tensors, {});
            return;
        }
        // equal parts of several devices are written once
        const auto &                                        steps = splitter.split(in.context->get_sched(), graph);
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

    json_line write_steps(const std::vector<device_step> & steps) const {
        json_line tensors;
        tensors.begin_array("tensors");
        graph_writer writer(tensors, role_on_device);
        for (const device_step & step : steps) {
            if (step.part) {
                writer.write(step.part);
            } else {
                writer.write_all_reduce(step.sum, (int) in.opts.n_devices);
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
        out.integer("n_ctx", in.context->n_ctx());
        out.integer("n_ubatch", in.context->n_ubatch());
        out.integer("n_seq_max", in.context->n_seq_max());
        out.boolean("flash_attn", in.flash_attn);
        out.boolean("kv_unified", in.context->get_cparams().kv_unified);
        out.text("type_k", ggml_type_name(in.type_k));
        out.text("type_v", ggml_type_name(in.type_v));
        if (!in.opts.samplers.empty()) {
            out.text("samplers", in.opts.chain.c_str());
        }
        out.end_object();
        if (!devices.empty()) {
            out.begin_object("split");
            out.text("mode", "tensor");
            out.integer("devices", in.opts.n_devices);
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
        return in.weights.count(t->name) ? "weight" : "cache";
    }

    // Returns the number of tokens that each sequence must have in the cache, so that the graph reads n_kv cells.
    uint32_t tokens_before(const graph_size & size, uint32_t n_seqs) const {
        if (!size.n_kv) {
            return 0;
        }
        // each sequence has its own cache, unless the cache is unified
        const uint32_t share = in.context->get_cparams().kv_unified ? size.n_kv / n_seqs : size.n_kv;
        const uint32_t own   = size.n_tokens / n_seqs;
        if (share < own || share > in.context->n_ctx_seq()) {
            throw std::runtime_error("a cache of " + std::to_string(size.n_kv) + " cells is not one that " +
                                     std::to_string(own) + " tokens of each of " + std::to_string(n_seqs) +
                                     " sequences meet in a context of " + std::to_string(in.context->n_ctx()));
        }
        return share - own;
    }

    // Finds cells for the tokens and marks them as used, as llama_decode does before it builds a graph.
    llama_memory_context_ptr next_call(llama_memory_i &     memory,
                                       llama_batch_allocr & batch,
                                       uint32_t             n_tokens,
                                       uint32_t             n_seqs,
                                       bool                 all_outputs) const {
        llama_batch_ext tokens(in.context.get());
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
        if (!batch.init(tokens, *llama_model_get_vocab(in.model.get()), in.opts.embeddings)) {
            throw std::runtime_error("llama.cpp refuses the tokens: " + last_complaint);
        }
        auto found = memory.init_batch(batch, in.context->n_ubatch(), in.opts.embeddings);
        if (!found || found->get_status() != LLAMA_MEMORY_STATUS_SUCCESS || !found->apply()) {
            throw std::runtime_error("llama.cpp finds no place in its cache for " + std::to_string(n_tokens * n_seqs) +
                                     " tokens: " + last_complaint);
        }
        return found;
    }

    model_context  in;
    graph_splitter splitter;
};

}  // namespace

void write_model_graphs(const options &                  opts,
                        const std::vector<sparse_file> & files,
                        const std::vector<sparse_file> & others) {
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
