#include "projector_graphs.h"

#include "complaints.h"
#include "ggml-cpp.h"
#include "gguf.h"
#include "header_line.h"
#include "projector.h"
#include "sparse_file.h"

#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

namespace {

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
            // The messages contain the name under which the file is opened here.
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

// Writes one graph. Tensors that are neither weights nor results of nodes are its inputs.
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

}  // namespace

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
