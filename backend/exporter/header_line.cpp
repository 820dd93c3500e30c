#include "header_line.h"

#include "ggml.h"
#include "llama.h"

void begin_header(json_line & out) {
    out.begin_object();
    out.text("format", "neuron-kernelgen graphs");
    out.integer("version", GRAPH_FORMAT_VERSION);
    out.text("ggml", ggml_version());
    out.text("llama_cpp", llama_version());
    out.begin_object("model");
}
