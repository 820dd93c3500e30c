#include "options.h"

#include "ggml-backend.h"
#include "llama.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>

namespace {

// A mistake in the command line.
struct usage_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// llama.cpp counts cells in 32 bits. A larger number would overflow when it is padded.
constexpr uint32_t MAX_SIZE = 1u << 30;

// llama.cpp counts the pixels of an image in 32 bits.
constexpr uint32_t MAX_SIDE = 1u << 14;

constexpr uint32_t MAX_SECONDS = 3600;

uint32_t read_number(const std::string & text) {
    char * end                      = nullptr;
    errno                           = 0;
    const unsigned long long number = strtoull(text.c_str(), &end, 10);
    if (text.empty() || text[0] < '0' || text[0] > '9' || *end || errno || number > MAX_SIZE) {
        throw usage_error("expected a number up to " + std::to_string(MAX_SIZE) + ", not '" + text + "'");
    }
    return (uint32_t) number;
}

double read_float(const std::string & text) {
    char *       end   = nullptr;
    const double value = strtod(text.c_str(), &end);
    if (text.empty() || *end || !std::isfinite((float) value)) {
        throw usage_error("expected a number, not '" + text + "'");
    }
    return value;
}

ggml_type read_type(const std::string & text) {
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const ggml_type_traits * traits = ggml_get_type_traits((ggml_type) i);
        if (traits->type_name && traits->blck_size > 0 && text == traits->type_name) {
            return (ggml_type) i;
        }
    }
    throw usage_error("unknown type '" + text + "'");
}

// Returns the number of a word in a list.
int read_word(const std::string & text, const std::vector<std::string> & words) {
    const auto  found = std::find(words.begin(), words.end(), text);
    std::string known;
    for (size_t i = 0; i < words.size(); i++) {
        known += (i == 0 ? "" : i + 1 == words.size() ? " or " : ", ") + words[i];
    }
    if (found == words.end()) {
        throw usage_error("expected " + known + ", not '" + text + "'");
    }
    return (int) (found - words.begin());
}

// Quantizations by llama-quantize's names.
struct ftype_name {
    const char * name;
    llama_ftype  ftype;
};

constexpr ftype_name FTYPES[] = {
    { "F32",     LLAMA_FTYPE_ALL_F32        },
    { "F16",     LLAMA_FTYPE_MOSTLY_F16     },
    { "BF16",    LLAMA_FTYPE_MOSTLY_BF16    },
    { "Q4_0",    LLAMA_FTYPE_MOSTLY_Q4_0    },
    { "Q4_1",    LLAMA_FTYPE_MOSTLY_Q4_1    },
    { "Q5_0",    LLAMA_FTYPE_MOSTLY_Q5_0    },
    { "Q5_1",    LLAMA_FTYPE_MOSTLY_Q5_1    },
    { "Q8_0",    LLAMA_FTYPE_MOSTLY_Q8_0    },
    { "Q2_K",    LLAMA_FTYPE_MOSTLY_Q2_K    },
    { "Q3_K_S",  LLAMA_FTYPE_MOSTLY_Q3_K_S  },
    { "Q3_K_M",  LLAMA_FTYPE_MOSTLY_Q3_K_M  },
    { "Q3_K_L",  LLAMA_FTYPE_MOSTLY_Q3_K_L  },
    { "Q4_K_S",  LLAMA_FTYPE_MOSTLY_Q4_K_S  },
    { "Q4_K_M",  LLAMA_FTYPE_MOSTLY_Q4_K_M  },
    { "Q5_K_S",  LLAMA_FTYPE_MOSTLY_Q5_K_S  },
    { "Q5_K_M",  LLAMA_FTYPE_MOSTLY_Q5_K_M  },
    { "Q6_K",    LLAMA_FTYPE_MOSTLY_Q6_K    },
    { "IQ2_XXS", LLAMA_FTYPE_MOSTLY_IQ2_XXS },
    { "IQ2_XS",  LLAMA_FTYPE_MOSTLY_IQ2_XS  },
    { "IQ2_S",   LLAMA_FTYPE_MOSTLY_IQ2_S   },
    { "IQ2_M",   LLAMA_FTYPE_MOSTLY_IQ2_M   },
    { "IQ3_XXS", LLAMA_FTYPE_MOSTLY_IQ3_XXS },
    { "IQ3_XS",  LLAMA_FTYPE_MOSTLY_IQ3_XS  },
    { "IQ3_S",   LLAMA_FTYPE_MOSTLY_IQ3_S   },
    { "IQ3_M",   LLAMA_FTYPE_MOSTLY_IQ3_M   },
    { "IQ4_NL",  LLAMA_FTYPE_MOSTLY_IQ4_NL  },
    { "IQ4_XS",  LLAMA_FTYPE_MOSTLY_IQ4_XS  },
};

int read_ftype(const std::string & text) {
    std::string known;
    for (const ftype_name & entry : FTYPES) {
        if (text == entry.name) {
            return (int) entry.ftype;
        }
        known += (known.empty() ? "" : ", ") + std::string(entry.name);
    }
    throw usage_error("unknown quantization '" + text + "': expected one of " + known);
}

std::vector<std::string> split(const std::string & text, char separator) {
    std::vector<std::string> parts;
    size_t                   begin = 0;
    for (size_t end; (end = text.find(separator, begin)) != std::string::npos; begin = end + 1) {
        parts.push_back(text.substr(begin, end - begin));
    }
    parts.push_back(text.substr(begin));
    return parts;
}

// Reads "n_tokens=512,n_outputs=1,n_seqs=1,n_kv=1024"; omitted sizes have their defaults.
graph_size read_graph(const std::string & text) {
    graph_size size;
    for (const std::string & part : split(text, ',')) {
        const size_t      equals = part.find('=');
        const std::string name   = part.substr(0, equals);
        uint32_t *        value  = name == "n_tokens"    ? &size.n_tokens
                                   : name == "n_outputs" ? &size.n_outputs
                                   : name == "n_seqs"    ? &size.n_seqs
                                   : name == "n_kv"      ? &size.n_kv
                                                         : nullptr;
        if (!value || equals == std::string::npos) {
            throw usage_error("expected n_tokens=, n_outputs=, n_seqs= or n_kv=, not '" + part + "'");
        }
        *value = read_number(part.substr(equals + 1));
    }
    if (size.n_tokens == 0 || size.n_seqs == 0 || size.n_tokens % size.n_seqs != 0) {
        throw usage_error("n_tokens is a multiple of n_seqs, and neither is 0: '" + text + "'");
    }
    if (size.n_outputs > size.n_tokens) {
        throw usage_error("n_outputs is at most n_tokens: '" + text + "'");
    }
    return size;
}

// Reads "FILE:SCALE"; the file's name may have colons.
scaled_adapter read_adapter(const std::string & text) {
    const size_t      colon = text.rfind(':');
    const std::string scale = colon == std::string::npos ? "" : text.substr(colon + 1);
    char *            end   = nullptr;
    const float       value = strtof(scale.c_str(), &end);
    if (scale.empty() || *end || !std::isfinite(value)) {
        throw usage_error("expected FILE:SCALE, not '" + text + "'");
    }
    return { text.substr(0, colon), value };
}

// The samplers that llama.cpp computes on a device, with the defaults of its options.
const std::vector<sampler_option> & known_samplers() {
    static const std::vector<sampler_option> known = {
        { "greedy",      {}                },
        { "dist",        {}                },
        { "top_k",       { 40 }            },
        { "top_p",       { 0.95 }          },
        { "min_p",       { 0.05 }          },
        { "temperature", { 0.8, 0, 1 }     }, // with the range and the exponent of a dynamic temperature
        { "logit_bias",  { 1 }             }, // for this many tokens
        { "penalties",   { 64, 1.1, 0, 0 } }, // of the last tokens: repeated, by frequency, by presence
    };
    return known;
}

// Reads "top_k=40,temperature=0.8,dist"; a sampler's numbers are separated by colons.
std::vector<sampler_option> read_samplers(const std::string & text) {
    std::vector<sampler_option> samplers;
    for (const std::string & part : split(text, ',')) {
        const size_t   equals = part.find('=');
        sampler_option sampler;
        std::string    names;
        for (const sampler_option & known : known_samplers()) {
            names += (names.empty() ? "" : ", ") + known.name;
            if (part.substr(0, equals) == known.name) {
                sampler = known;
            }
        }
        if (sampler.name.empty()) {
            throw usage_error("unknown sampler '" + part.substr(0, equals) +
                              "': llama.cpp computes these on a device: " + names);
        }
        const std::vector<std::string> numbers =
            equals == std::string::npos ? std::vector<std::string>() : split(part.substr(equals + 1), ':');
        if (numbers.size() > sampler.numbers.size()) {
            const size_t most = sampler.numbers.size();
            throw usage_error("'" + part + "': " + sampler.name + " has " + std::to_string(most) +
                              (most == 1 ? " number" : " numbers"));
        }
        for (size_t i = 0; i < numbers.size(); i++) {
            sampler.numbers[i] = read_float(numbers[i]);
            if (fabs(sampler.numbers[i]) > MAX_SIZE) {
                throw usage_error("'" + part + "': expected a number, not '" + numbers[i] + "'");
            }
        }
        samplers.push_back(sampler);
    }
    return samplers;
}

// Reads "640x480".
image_size read_image(const std::string & text) {
    const std::vector<std::string> sides = split(text, 'x');
    const auto                     side  = [&sides](size_t i) {
        return sides.size() == 2 ? read_number(sides[i]) : 0;
    };
    const uint32_t width = side(0), height = side(1);
    if (width < 1 || height < 1 || width > MAX_SIDE || height > MAX_SIDE) {
        throw usage_error("expected WIDTHxHEIGHT, each up to " + std::to_string(MAX_SIDE) + " pixels, not '" + text +
                          "'");
    }
    return { (int32_t) width, (int32_t) height };
}

uint32_t read_seconds(const std::string & text) {
    const uint32_t seconds = read_number(text);
    if (seconds < 1 || seconds > MAX_SECONDS) {
        throw usage_error("expected 1 to " + std::to_string(MAX_SECONDS) + " seconds, not '" + text + "'");
    }
    return seconds;
}

std::vector<bool> read_flash_attn(const std::string & text) {
    std::vector<bool> all;
    for (const std::string & word : split(text, ',')) {
        all.push_back(read_word(word, { "off", "on" }) == 1);
    }
    return all;
}

// Reads "KEY=TYPE:VALUE", as in llama.cpp's --override-kv.
llama_model_kv_override read_override(const std::string & text) {
    const size_t            equals   = text.find('=');
    const size_t            colon    = equals == std::string::npos ? equals : text.find(':', equals);
    const std::string       key      = text.substr(0, equals);
    const std::string       type     = colon == std::string::npos ? "" : text.substr(equals + 1, colon - equals - 1);
    const std::string       value    = colon == std::string::npos ? "" : text.substr(colon + 1);
    char *                  end      = nullptr;
    llama_model_kv_override override = {};
    bool                    valid    = !key.empty() && key.size() < sizeof(override.key) && !value.empty();
    if (type == "int") {
        override.tag     = LLAMA_KV_OVERRIDE_TYPE_INT;
        override.val_i64 = strtoll(value.c_str(), &end, 10);
        valid            = valid && !*end;
    } else if (type == "float") {
        override.tag     = LLAMA_KV_OVERRIDE_TYPE_FLOAT;
        override.val_f64 = strtod(value.c_str(), &end);
        valid            = valid && !*end && std::isfinite(override.val_f64);
    } else if (type == "bool") {
        override.tag      = LLAMA_KV_OVERRIDE_TYPE_BOOL;
        override.val_bool = value == "true";
        valid             = valid && (value == "true" || value == "false");
    } else {
        override.tag = LLAMA_KV_OVERRIDE_TYPE_STR;
        valid        = valid && type == "str" && value.size() < sizeof(override.val_str);
    }
    if (!valid) {
        throw usage_error("expected KEY=int:N, KEY=float:N, KEY=bool:true, KEY=bool:false or KEY=str:TEXT, with a key "
                          "and a text of at most 127 characters, not '" +
                          text + "'");
    }
    memcpy(override.key, key.c_str(), key.size());
    if (override.tag == LLAMA_KV_OVERRIDE_TYPE_STR) {
        memcpy(override.val_str, value.c_str(), value.size());
    }
    return override;
}

// An option of the command line.
struct option {
    const char *                                        name;
    const char *                                        value;  // its name; "" for an option without one
    const char *                                        help;
    std::function<void(options &, const std::string &)> read;
};

// Returns the reader of an option for one member.
template <typename T, typename R> auto into(T options::* member, R (*read)(const std::string &)) {
    return [member, read](options & o, const std::string & text) {
        o.*member = (T) read(text);
    };
}

auto text_into(std::string options::* member) {
    return [member](options & o, const std::string & text) {
        o.*member = text;
    };
}

// Returns the reader of an option that adds an item.
template <typename T> auto onto(std::vector<T> options::* member, T (*read)(const std::string &)) {
    return [member, read](options & o, const std::string & text) {
        (o.*member).push_back(read(text));
    };
}

auto flag(bool options::* member) {
    return [member](options & o, const std::string &) {
        o.*member = true;
    };
}

auto rope(float llama_context_params::* member) {
    return [member](options & o, const std::string & text) {
        o.rope.*member = (float) read_float(text);
    };
}

const std::vector<option> & known_options() {
    using o                                = options;
    static const std::vector<option> known = {
        { "--graph", "SIZES", "n_tokens=512,n_outputs=1,n_seqs=1,n_kv=1024: the sizes of one call",
         onto(&o::graphs, read_graph) },
        { "--ctx-size", "N", "cells of the KV cache (4096)", into(&o::n_ctx, read_number) },
        { "--ubatch-size", "N", "tokens that a call has at most (512)", into(&o::n_ubatch, read_number) },
        { "--parallel", "N", "sequences at once (1)", into(&o::n_seq_max, read_number) },
        { "--cache-type-k", "TYPE", "type of the cache's keys (f16)", into(&o::type_k, read_type) },
        { "--cache-type-v", "TYPE", "type of the cache's values (f16)", into(&o::type_v, read_type) },
        { "--flash-attn", "WHAT", "on, off, or on,off for the graphs of both (on)",
         into(&o::flash_attn, read_flash_attn) },
        { "--ftype", "NAME", "types that llama-quantize would give the tensors (Q4_K_M); the file's by default",
         into(&o::ftype, read_ftype) },
        { "--rope-scaling", "TYPE", "llama.cpp's options of RoPE",
         [](options & opts, const std::string & text) {
              opts.rope.rope_scaling_type = (llama_rope_scaling_type) read_word(text, { "none", "linear", "yarn" });
          } },
        { "--rope-scale", "N", "",
         [](options & opts, const std::string & text) {
              opts.rope.rope_freq_scale = 1.0f / (float) read_float(text);
          } },
        { "--rope-freq-base", "N", "", rope(&llama_context_params::rope_freq_base) },
        { "--rope-freq-scale", "N", "", rope(&llama_context_params::rope_freq_scale) },
        { "--yarn-orig-ctx", "N", "",
         [](options & opts, const std::string & text) { opts.rope.yarn_orig_ctx = read_number(text); } },
        { "--yarn-ext-factor", "N", "", rope(&llama_context_params::yarn_ext_factor) },
        { "--yarn-attn-factor", "N", "", rope(&llama_context_params::yarn_attn_factor) },
        { "--yarn-beta-slow", "N", "", rope(&llama_context_params::yarn_beta_slow) },
        { "--yarn-beta-fast", "N", "", rope(&llama_context_params::yarn_beta_fast) },
        { "--override-kv", "KEY=TYPE:VALUE,...", "other metadata than the file's, as in llama.cpp",
         [](options & opts, const std::string & text) {
              for (const std::string & part : split(text, ',')) {
                  opts.kv_overrides.push_back(read_override(part));
              }
          } },
        { "--kv-unified", "", "sequences share one cache", flag(&o::kv_unified) },
        { "--swa-full", "", "sliding windows have a cache as long as the others", flag(&o::swa_full) },
        { "--split-mode", "MODE",
         "tensor: the graphs of each of the devices over which llama.cpp splits tensors (none)", [](options & opts, const std::string & text) {
              opts.split_tensors = read_word(text, { "none", "tensor" }) == 1;
          } },
        { "--devices", "N", "devices of --split-mode tensor, 2 to 16", into(&o::n_devices, read_number) },
        { "--lora", "FILE", "a LoRA adapter; only its header is read",
         [](options & opts, const std::string & text) { opts.adapters.push_back({ text, 1 }); } },
        { "--lora-scaled", "FILE:SCALE", "the same, multiplied by a number", onto(&o::adapters, read_adapter) },
        { "--control-vector", "", "layers add a control vector, from the second to the last",
         flag(&o::control_vector) },
        { "--encoder", "", "the graphs of the encoder of a model that has a decoder, too", flag(&o::encoder) },
        { "--n-encoded", "N", "tokens that such an encoder has computed when its decoder is called (as in training)",
         into(&o::n_encoded, read_number) },
        { "--embeddings", "", "calls compute embeddings of all their tokens", flag(&o::embeddings) },
        { "--pooling", "TYPE", "how these are pooled: none, mean, cls, last or rank; as the file says by default",
         [](options & opts, const std::string & text) {  // by llama_pooling_type
              opts.pooling = read_word(text, { "none", "mean", "cls", "last", "rank" });
          } },
        { "--spec-type", "TYPE",
         "draft-mtp or draft-eagle3: the model's graphs give what such a draft reads; draft-simple: only the "
          "vocabularies are compared", [](options & opts, const std::string & text) {
              (void) read_word(text, { "draft-simple", "draft-mtp", "draft-eagle3" });
              opts.spec_type = text;
          } },
        { "--model-draft", "FILE",
         "the file of that draft; only its header is read; for draft-mtp the model by default", text_into(&o::model_draft) },
        { "--cache-type-k-draft", "TYPE", "type of the keys in the cache of --draft (f16)",
         into(&o::type_k_draft, read_type) },
        { "--cache-type-v-draft", "TYPE", "type of its values (f16)", into(&o::type_v_draft, read_type) },
        { "--spec-draft-n-max", "N", "tokens that it proposes at most, on which a recurrent model's graphs depend (0)",
         into(&o::draft_n_max, read_number) },
        { "--draft", "", "in place of the model's graphs: those of the draft; with --encoder those of its encoder",
         flag(&o::draft) },
        { "--shift", "", "in place of --graph: the graphs that shift the positions of all keys in the cache, if any",
         flag(&o::shift) },
        { "--mmproj", "FILE", "in place of a model: the graphs of llama.cpp's mtmd for its warm-up",
         text_into(&o::mmproj) },
        { "--image-size", "WxH", "and for an image of so many pixels", onto(&o::images, read_image) },
        { "--image-min-tokens", "N", "tokens that an image of any size has; as the file says by default",
         into(&o::image_min_tokens, read_number) },
        { "--image-max-tokens", "N", "", into(&o::image_max_tokens, read_number) },
        { "--audio-seconds", "N", "and for so much sound", onto(&o::seconds, read_seconds) },
        { "--samplers", "CHAIN",
         "top_k=40,temperature=0.8,dist: the samplers of each sequence on the device, with numbers separated by "
          "colons", [](options & opts, const std::string & text) {
              opts.samplers = read_samplers(text);
              opts.chain    = text;
          } },
        { "--version", "", "print the llama.cpp that this program was built for", flag(&o::version) },
    };
    return known;
}

// Reads the arguments. Returns false for --help.
bool read_arguments(int argc, char ** argv, options & opts) {
    for (int i = 1; i < argc; i++) {
        const std::string argument = argv[i];
        const auto        found    = std::find_if(known_options().begin(), known_options().end(),
                                                  [&](const option & one) { return argument == one.name; });
        if (argument == "--help" || argument == "-h") {
            return false;
        }
        if (found != known_options().end()) {
            if (*found->value && i + 1 == argc) {
                throw usage_error(argument + " needs a value");
            }
            try {
                found->read(opts, *found->value ? argv[++i] : "");
            } catch (const usage_error & error) {
                throw usage_error(argument + ": " + error.what());
            }
        } else if (!argument.empty() && argument[0] == '-') {
            throw usage_error("unknown option " + argument);
        } else if (!opts.model.empty()) {
            throw usage_error("one model at a time: " + opts.model + ", " + argument);
        } else {
            opts.model = argument;
        }
    }
    return true;
}

// Throws if options contradict each other.
void check_options(const options & opts) {
    const auto require = [](bool condition, const std::string & mistake) {
        if (!condition) {
            throw usage_error(mistake);
        }
    };
    if (!opts.mmproj.empty()) {
        require(opts.model.empty() && opts.graphs.empty() && !opts.shift,
                "--mmproj is given without a model, --graph and --shift");
        return;
    }
    require(opts.images.empty() && opts.seconds.empty() && !opts.image_min_tokens && !opts.image_max_tokens,
            "options of images and sound are for --mmproj");
    require(!opts.model.empty(), "no model given");
    require(opts.graphs.empty() == opts.shift, opts.shift ? "--shift is given without --graph" : "no --graph given");
    require(opts.n_ctx && opts.n_ubatch && opts.n_seq_max, "--ctx-size, --ubatch-size and --parallel are at least 1");
    require(opts.split_tensors ? opts.n_devices >= 2 && opts.n_devices <= GGML_BACKEND_META_MAX_DEVICES
                               : opts.n_devices == 1,
            "--devices is 2 to " + std::to_string(GGML_BACKEND_META_MAX_DEVICES) +
                " with --split-mode tensor, and not given without");
    const bool is_simple = opts.spec_type == "draft-simple";
    require(opts.spec_type.empty() ? !opts.draft && opts.model_draft.empty()
                                   : opts.spec_type == "draft-mtp" || !opts.model_draft.empty(),
            "--draft and --model-draft belong to --spec-type, and draft-simple and draft-eagle3 have a --model-draft");
    require(!is_simple || !opts.draft,
            "--draft is given without --spec-type draft-simple: the graphs of such a draft are those of its model "
            "alone");
    require(!opts.split_tensors || opts.spec_type.empty() || is_simple,
            "--spec-type is given without --split-mode tensor");
    require(!opts.split_tensors || opts.samplers.empty(),
            "--samplers: llama.cpp samples on the CPU with --split-mode tensor");
}

}  // namespace

std::string usage() {
    std::string text =
        "usage: export-graphs MODEL.gguf --graph SIZES [--graph SIZES]... [options]\n"
        "       export-graphs MODEL.gguf --shift [options]\n"
        "       export-graphs --mmproj FILE [--image-size SIZE]... [--audio-seconds N]... [--flash-attn WHAT]\n"
        "\n"
        "Prints the graphs that llama.cpp builds for a model, one JSON object a line (docs/reference/graphs.md).\n"
        "Of the file only the header is read; the weights may be missing. Of a split model the first file is named.\n"
        "\n";
    for (const option & one : known_options()) {
        std::string line = std::string("  ") + one.name + " " + one.value;
        line.resize(std::max<size_t>(line.size() + 2, 28), ' ');
        line += one.help;
        text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    }
    return text + "\nExit status: 0 done, 2 wrong usage or a model that llama.cpp does not take.\n";
}

bool parse_options(int argc, char ** argv, options & opts, std::string & mistake) {
    try {
        if (!read_arguments(argc, argv, opts)) {
            return false;
        }
        if (!opts.version) {
            check_options(opts);
        }
        return true;
    } catch (const usage_error & error) {
        mistake = error.what();
        return false;
    }
}
