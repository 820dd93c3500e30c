#include "options.h"

#include "ggml-backend.h"
#include "llama.h"

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>

namespace {

// llama.cpp counts cells in 32 bits. A larger number would overflow when it is padded.
constexpr uint32_t MAX_SIZE = 1u << 30;

bool read_number(const std::string & text, uint32_t & value, std::string & mistake) {
    char * end                      = nullptr;
    errno                           = 0;
    const unsigned long long number = strtoull(text.c_str(), &end, 10);
    if (text.empty() || text[0] < '0' || text[0] > '9' || *end || errno || number > MAX_SIZE) {
        mistake = "expected a number up to " + std::to_string(MAX_SIZE) + ", not '" + text + "'";
        return false;
    }
    value = (uint32_t) number;
    return true;
}

bool read_type(const std::string & text, ggml_type & type, std::string & mistake) {
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const ggml_type_traits * traits = ggml_get_type_traits((ggml_type) i);
        if (traits->type_name && traits->blck_size > 0 && text == traits->type_name) {
            type = (ggml_type) i;
            return true;
        }
    }
    mistake = "unknown type '" + text + "'";
    return false;
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

bool read_ftype(const std::string & text, int & ftype, std::string & mistake) {
    std::string known;
    for (const ftype_name & entry : FTYPES) {
        if (text == entry.name) {
            ftype = (int) entry.ftype;
            return true;
        }
        known += (known.empty() ? "" : ", ") + std::string(entry.name);
    }
    mistake = "unknown quantization '" + text + "': expected one of " + known;
    return false;
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
bool read_graph(const std::string & text, graph_size & size, std::string & mistake) {
    for (const std::string & part : split(text, ',')) {
        const size_t      equals = part.find('=');
        const std::string name   = part.substr(0, equals);
        uint32_t *        value  = name == "n_tokens"    ? &size.n_tokens
                                   : name == "n_outputs" ? &size.n_outputs
                                   : name == "n_seqs"    ? &size.n_seqs
                                   : name == "n_kv"      ? &size.n_kv
                                                         : nullptr;
        if (!value || equals == std::string::npos) {
            mistake = "--graph: expected n_tokens=, n_outputs=, n_seqs= or n_kv=, not '" + part + "'";
            return false;
        }
        if (!read_number(part.substr(equals + 1), *value, mistake)) {
            mistake = "--graph: " + name + ": " + mistake;
            return false;
        }
    }
    if (size.n_tokens == 0 || size.n_seqs == 0 || size.n_tokens % size.n_seqs != 0) {
        mistake = "--graph: n_tokens is a multiple of n_seqs, and neither is 0: '" + text + "'";
        return false;
    }
    if (size.n_outputs > size.n_tokens) {
        mistake = "--graph: n_outputs is at most n_tokens: '" + text + "'";
        return false;
    }
    return true;
}

// Reads "FILE:SCALE"; the file's name may have colons.
bool read_adapter(const std::string & text, scaled_adapter & adapter, std::string & mistake) {
    const size_t      colon = text.rfind(':');
    const std::string scale = colon == std::string::npos ? "" : text.substr(colon + 1);
    char *            end   = nullptr;
    adapter.file            = text.substr(0, colon);
    adapter.scale           = strtof(scale.c_str(), &end);
    if (scale.empty() || *end || !std::isfinite(adapter.scale)) {
        mistake = "expected FILE:SCALE, not '" + text + "'";
        return false;
    }
    return true;
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
bool read_samplers(const std::string & text, std::vector<sampler_option> & samplers, std::string & mistake) {
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
            mistake =
                "unknown sampler '" + part.substr(0, equals) + "': llama.cpp computes these on a device: " + names;
            return false;
        }
        const std::vector<std::string> numbers =
            equals == std::string::npos ? std::vector<std::string>() : split(part.substr(equals + 1), ':');
        if (numbers.size() > sampler.numbers.size()) {
            const size_t most = sampler.numbers.size();
            mistake           = "'" + part + "': " + sampler.name + " has " + std::to_string(most) +
                                (most == 1 ? " number" : " numbers");
            return false;
        }
        for (size_t i = 0; i < numbers.size(); i++) {
            char * end         = nullptr;
            sampler.numbers[i] = strtod(numbers[i].c_str(), &end);
            if (numbers[i].empty() || *end || !std::isfinite(sampler.numbers[i]) ||
                fabs(sampler.numbers[i]) > MAX_SIZE) {
                mistake = "'" + part + "': expected a number, not '" + numbers[i] + "'";
                return false;
            }
        }
        samplers.push_back(sampler);
    }
    return true;
}

// llama.cpp counts the pixels of an image in 32 bits.
constexpr uint32_t MAX_SIDE = 1u << 14;

constexpr uint32_t MAX_SECONDS = 3600;

// Reads "640x480".
bool read_image(const std::string & text, image_size & size, std::string & mistake) {
    const std::vector<std::string> sides = split(text, 'x');
    uint32_t                       width = 0, height = 0;
    if (sides.size() != 2 || !read_number(sides[0], width, mistake) || !read_number(sides[1], height, mistake) ||
        width < 1 || height < 1 || width > MAX_SIDE || height > MAX_SIDE) {
        mistake = "expected WIDTHxHEIGHT, each up to " + std::to_string(MAX_SIDE) + " pixels, not '" + text + "'";
        return false;
    }
    size = { (int32_t) width, (int32_t) height };
    return true;
}

constexpr const char * POOLINGS[] = { "none", "mean", "cls", "last", "rank" };  // by llama_pooling_type

bool read_pooling(const std::string & text, int & pooling, std::string & mistake) {
    for (pooling = 0; pooling < (int) (sizeof(POOLINGS) / sizeof(*POOLINGS)); pooling++) {
        if (text == POOLINGS[pooling]) {
            return true;
        }
    }
    mistake = "expected none, mean, cls, last or rank, not '" + text + "'";
    return false;
}

bool read_float(const std::string & text, float & value, std::string & mistake) {
    char * end = nullptr;
    value      = strtof(text.c_str(), &end);
    if (text.empty() || *end || !std::isfinite(value)) {
        mistake = "expected a number, not '" + text + "'";
        return false;
    }
    return true;
}

// Reads llama.cpp's options --rope-* and --yarn-*.
bool read_rope(const std::string &    name,
               const std::string &    value,
               llama_context_params & rope,
               std::string &          mistake) {
    if (name == "--rope-scaling") {
        const std::map<std::string, llama_rope_scaling_type> types = {
            { "none",   LLAMA_ROPE_SCALING_TYPE_NONE   },
            { "linear", LLAMA_ROPE_SCALING_TYPE_LINEAR },
            { "yarn",   LLAMA_ROPE_SCALING_TYPE_YARN   },
        };
        const auto type = types.find(value);
        if (type == types.end()) {
            mistake = "expected none, linear or yarn, not '" + value + "'";
            return false;
        }
        rope.rope_scaling_type = type->second;
        return true;
    }
    if (name == "--rope-scale") {
        float scale = 0;
        if (!read_float(value, scale, mistake)) {
            return false;
        }
        rope.rope_freq_scale = 1.0f / scale;
        return true;
    }
    if (name == "--yarn-orig-ctx") {
        return read_number(value, rope.yarn_orig_ctx, mistake);
    }
    const std::map<std::string, float *> numbers = {
        { "--rope-freq-base",   &rope.rope_freq_base   },
        { "--rope-freq-scale",  &rope.rope_freq_scale  },
        { "--yarn-ext-factor",  &rope.yarn_ext_factor  },
        { "--yarn-attn-factor", &rope.yarn_attn_factor },
        { "--yarn-beta-slow",   &rope.yarn_beta_slow   },
        { "--yarn-beta-fast",   &rope.yarn_beta_fast   },
    };
    const auto number = numbers.find(name);
    return number != numbers.end() && read_float(value, *number->second, mistake);
}

// Reads "KEY=TYPE:VALUE", as in llama.cpp's --override-kv.
bool read_override(const std::string & text, llama_model_kv_override & override, std::string & mistake) {
    const size_t      equals = text.find('=');
    const size_t      colon  = equals == std::string::npos ? equals : text.find(':', equals);
    const std::string key    = text.substr(0, equals);
    const std::string type   = colon == std::string::npos ? "" : text.substr(equals + 1, colon - equals - 1);
    const std::string value  = colon == std::string::npos ? "" : text.substr(colon + 1);
    char *            end    = nullptr;
    bool              valid  = !key.empty() && key.size() < sizeof(override.key) && !value.empty();
    override                 = {};
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
        mistake = "expected KEY=int:N, KEY=float:N, KEY=bool:true, KEY=bool:false or KEY=str:TEXT, with a key and a "
                  "text of at "
                  "most 127 characters, not '" +
                  text + "'";
        return false;
    }
    memcpy(override.key, key.c_str(), key.size());
    if (override.tag == LLAMA_KV_OVERRIDE_TYPE_STR) {
        memcpy(override.val_str, value.c_str(), value.size());
    }
    return true;
}

bool read_value(const std::string & name, const std::string & value, options & opts, std::string & mistake) {
    if (name == "--ctx-size") {
        return read_number(value, opts.n_ctx, mistake);
    }
    if (name == "--ubatch-size") {
        return read_number(value, opts.n_ubatch, mistake);
    }
    if (name == "--parallel") {
        return read_number(value, opts.n_seq_max, mistake);
    }
    if (name == "--cache-type-k") {
        return read_type(value, opts.type_k, mistake);
    }
    if (name == "--cache-type-v") {
        return read_type(value, opts.type_v, mistake);
    }
    if (name == "--cache-type-k-draft") {
        return read_type(value, opts.type_k_draft, mistake);
    }
    if (name == "--cache-type-v-draft") {
        return read_type(value, opts.type_v_draft, mistake);
    }
    if (name.rfind("--rope-", 0) == 0 || name.rfind("--yarn-", 0) == 0) {
        return read_rope(name, value, opts.rope, mistake);
    }
    if (name == "--override-kv") {
        for (const std::string & part : split(value, ',')) {
            opts.kv_overrides.emplace_back();
            if (!read_override(part, opts.kv_overrides.back(), mistake)) {
                return false;
            }
        }
        return true;
    }
    if (name == "--ftype") {
        return read_ftype(value, opts.ftype, mistake);
    }
    if (name == "--split-mode") {
        if (value != "tensor" && value != "none") {
            mistake = "expected tensor or none, not '" + value + "'";
            return false;
        }
        opts.split_tensors = value == "tensor";
        return true;
    }
    if (name == "--lora") {
        opts.adapters.push_back({ value, 1 });
        return true;
    }
    if (name == "--lora-scaled") {
        opts.adapters.emplace_back();
        return read_adapter(value, opts.adapters.back(), mistake);
    }
    if (name == "--spec-type") {
        if (value != "draft-simple" && value != "draft-mtp" && value != "draft-eagle3") {
            mistake = "expected draft-simple, draft-mtp or draft-eagle3, not '" + value + "'";
            return false;
        }
        opts.spec_type = value;
        return true;
    }
    if (name == "--spec-draft-n-max") {
        return read_number(value, opts.draft_n_max, mistake);
    }
    if (name == "--model-draft") {
        opts.model_draft = value;
        return true;
    }
    if (name == "--mmproj") {
        opts.mmproj = value;
        return true;
    }
    if (name == "--image-size") {
        opts.images.emplace_back();
        return read_image(value, opts.images.back(), mistake);
    }
    if (name == "--image-min-tokens") {
        return read_number(value, opts.image_min_tokens, mistake);
    }
    if (name == "--image-max-tokens") {
        return read_number(value, opts.image_max_tokens, mistake);
    }
    if (name == "--audio-seconds") {
        uint32_t seconds = 0;
        if (!read_number(value, seconds, mistake)) {
            return false;
        }
        if (seconds < 1 || seconds > MAX_SECONDS) {
            mistake = "expected 1 to " + std::to_string(MAX_SECONDS) + " seconds, not '" + value + "'";
            return false;
        }
        opts.seconds.push_back(seconds);
        return true;
    }
    if (name == "--pooling") {
        return read_pooling(value, opts.pooling, mistake);
    }
    if (name == "--n-encoded") {
        return read_number(value, opts.n_encoded, mistake);
    }
    if (name == "--devices") {
        return read_number(value, opts.n_devices, mistake);
    }
    if (name == "--flash-attn") {
        opts.flash_attn.clear();
        for (const std::string & word : split(value, ',')) {
            if (word != "on" && word != "off") {
                mistake = "expected on, off or on,off, not '" + value + "'";
                return false;
            }
            opts.flash_attn.push_back(word == "on");
        }
        return true;
    }
    if (name == "--samplers") {
        opts.samplers.clear();
        opts.chain = value;
        return read_samplers(value, opts.samplers, mistake);
    }
    graph_size size;
    if (!read_graph(value, size, mistake)) {
        return false;
    }
    opts.graphs.push_back(size);
    return true;
}

}  // namespace

const char * usage() {
    return "usage: export-graphs MODEL.gguf --graph SIZES [--graph SIZES]... [options]\n"
           "       export-graphs MODEL.gguf --shift [options]\n"
           "       export-graphs --mmproj FILE [--image-size SIZE]... [--audio-seconds N]... [--flash-attn WHAT]\n"
           "\n"
           "Prints the graphs that llama.cpp builds for a model, one JSON object a line (docs/reference/graphs.md).\n"
           "Of the file only the header is read; the weights may be missing. Of a split model the first file is "
           "named.\n"
           "\n"
           "  --graph SIZES         n_tokens=512,n_outputs=1,n_seqs=1,n_kv=1024: the sizes of one call\n"
           "  --ctx-size N          cells of the KV cache (4096)\n"
           "  --ubatch-size N       tokens that a call has at most (512)\n"
           "  --parallel N          sequences at once (1)\n"
           "  --cache-type-k TYPE   type of the cache's keys (f16)\n"
           "  --cache-type-v TYPE   type of the cache's values (f16)\n"
           "  --flash-attn WHAT     on, off, or on,off for the graphs of both (on)\n"
           "  --ftype NAME          types that llama-quantize would give the tensors (Q4_K_M); those of the file by "
           "default\n"
           "  --rope-scaling TYPE, --rope-scale N, --rope-freq-base N, --rope-freq-scale N, --yarn-orig-ctx N,\n"
           "  --yarn-ext-factor N, --yarn-attn-factor N, --yarn-beta-slow N, --yarn-beta-fast N  llama.cpp's options "
           "of RoPE\n"
           "  --override-kv KEY=TYPE:VALUE,...  other metadata than the file's, as in llama.cpp; may be given several "
           "times\n"
           "  --kv-unified          sequences share one cache\n"
           "  --swa-full            sliding windows have a cache as long as the others\n"
           "  --split-mode MODE     tensor: the graphs of each of the devices over which llama.cpp splits tensors; "
           "none by "
           "default\n"
           "  --devices N           devices of --split-mode tensor, 2 to 16\n"
           "  --lora FILE           a LoRA adapter; only its header is read; may be given several times\n"
           "  --lora-scaled FILE:SCALE  the same, multiplied by a number\n"
           "  --control-vector      layers add a control vector, from the second to the last\n"
           "  --encoder             the graphs of the encoder of a model that has a decoder, too\n"
           "  --n-encoded N         tokens that such an encoder has computed when its decoder is called; as many as in "
           "training "
           "by default\n"
           "  --embeddings          calls compute embeddings of all their tokens\n"
           "  --pooling TYPE        how these are pooled: none, mean, cls, last or rank; as the file says by default\n"
           "  --spec-type TYPE      draft-mtp or draft-eagle3: the model's graphs give what such a draft reads; "
           "draft-simple: "
           "only\n"
           "                        the vocabularies are compared\n"
           "  --model-draft FILE    the file of that draft; only its header is read; for draft-mtp the model "
           "itself by default\n"
           "  --cache-type-k-draft TYPE, --cache-type-v-draft TYPE  types of the cache of --draft (f16)\n"
           "  --spec-draft-n-max N  tokens that it proposes at most, on which a recurrent model's graphs depend (0)\n"
           "  --draft               in place of the model's graphs: those of the draft; with --encoder those of its "
           "encoder\n"
           "  --shift               in place of --graph: the graphs that shift the positions of all keys in the cache, "
           "where "
           "the model has any\n"
           "  --mmproj FILE         in place of a model: the graphs that llama.cpp's mtmd computes images and sound "
           "with, of the "
           "sizes of its\n"
           "                        warm-up\n"
           "  --image-size WxH      and of an image of so many pixels, scaled and cut as llama.cpp does; may be given "
           "several "
           "times\n"
           "  --image-min-tokens N, --image-max-tokens N  tokens that an image of any size has; as the file says by "
           "default\n"
           "  --audio-seconds N     and of so much sound; may be given several times\n"
           "  --samplers CHAIN      top_k=40,temperature=0.8,dist: what llama.cpp samples each sequence with on the "
           "device; "
           "of\n"
           "                        greedy, dist, top_k=K, top_p=P, min_p=P, temperature=T[:RANGE[:EXPONENT]], "
           "logit_bias=TOKENS and\n"
           "                        penalties=LAST_N[:REPEAT[:FREQUENCY[:PRESENCE]]]; none by default\n"
           "  --version             print the llama.cpp that this program was built for\n"
           "\n"
           "Exit status: 0 done, 2 wrong usage or a model that llama.cpp does not take.\n";
}

bool parse_options(int argc, char ** argv, options & opts, std::string & mistake) {
    const char * const with_value[] = { "--graph",
                                        "--ctx-size",
                                        "--ubatch-size",
                                        "--parallel",
                                        "--cache-type-k",
                                        "--cache-type-v",
                                        "--cache-type-k-draft",
                                        "--cache-type-v-draft",
                                        "--rope-scaling",
                                        "--rope-scale",
                                        "--rope-freq-base",
                                        "--rope-freq-scale",
                                        "--yarn-orig-ctx",
                                        "--yarn-ext-factor",
                                        "--yarn-attn-factor",
                                        "--yarn-beta-slow",
                                        "--yarn-beta-fast",
                                        "--override-kv",
                                        "--flash-attn",
                                        "--ftype",
                                        "--split-mode",
                                        "--devices",
                                        "--lora",
                                        "--lora-scaled",
                                        "--pooling",
                                        "--samplers",
                                        "--n-encoded",
                                        "--spec-type",
                                        "--model-draft",
                                        "--mmproj",
                                        "--image-size",
                                        "--audio-seconds",
                                        "--image-min-tokens",
                                        "--image-max-tokens",
                                        "--spec-draft-n-max" };
    for (int i = 1; i < argc; i++) {
        const std::string argument = argv[i];
        bool              known    = false;
        for (const char * name : with_value) {
            if (argument == name) {
                known = true;
                if (i + 1 == argc) {
                    mistake = argument + " needs a value";
                    return false;
                }
                std::string wrong;
                if (!read_value(argument, argv[++i], opts, wrong)) {
                    mistake = argument + ": " + wrong;
                    return false;
                }
            }
        }
        if (known) {
            continue;
        }
        if (argument == "--help" || argument == "-h") {
            return false;
        }
        if (argument == "--kv-unified") {
            opts.kv_unified = true;
        } else if (argument == "--swa-full") {
            opts.swa_full = true;
        } else if (argument == "--embeddings") {
            opts.embeddings = true;
        } else if (argument == "--control-vector") {
            opts.control_vector = true;
        } else if (argument == "--encoder") {
            opts.encoder = true;
        } else if (argument == "--draft") {
            opts.draft = true;
        } else if (argument == "--shift") {
            opts.shift = true;
        } else if (argument == "--version") {
            opts.version = true;
        } else if (!argument.empty() && argument[0] == '-') {
            mistake = "unknown option " + argument;
            return false;
        } else if (!opts.model.empty()) {
            mistake = "one model at a time: " + opts.model + ", " + argument;
            return false;
        } else {
            opts.model = argument;
        }
    }
    if (opts.version) {
        return true;
    }
    if (!opts.mmproj.empty()) {
        if (!opts.model.empty() || !opts.graphs.empty() || opts.shift) {
            mistake = "--mmproj is given without a model, --graph and --shift";
            return false;
        }
        return true;
    }
    if (!opts.images.empty() || !opts.seconds.empty() || opts.image_min_tokens || opts.image_max_tokens) {
        mistake = "options of images and sound are for --mmproj";
        return false;
    }
    if (opts.model.empty()) {
        mistake = "no model given";
        return false;
    }
    if (opts.graphs.empty() != opts.shift) {
        mistake = opts.shift ? "--shift is given without --graph" : "no --graph given";
        return false;
    }
    if (opts.n_ctx == 0 || opts.n_ubatch == 0 || opts.n_seq_max == 0) {
        mistake = "--ctx-size, --ubatch-size and --parallel are at least 1";
        return false;
    }
    if (opts.split_tensors ? opts.n_devices < 2 || opts.n_devices > GGML_BACKEND_META_MAX_DEVICES
                           : opts.n_devices != 1) {
        mistake = "--devices is 2 to " + std::to_string(GGML_BACKEND_META_MAX_DEVICES) +
                  " with --split-mode tensor, and not given without";
        return false;
    }
    const bool is_simple = opts.spec_type == "draft-simple";
    if (opts.spec_type.empty() ? opts.draft || !opts.model_draft.empty()
                               : opts.spec_type != "draft-mtp" && opts.model_draft.empty()) {
        mistake =
            "--draft and --model-draft belong to --spec-type, and draft-simple and draft-eagle3 have a --model-draft";
        return false;
    }
    if (is_simple && opts.draft) {
        mistake = "--draft is given without --spec-type draft-simple: the graphs of such a draft are those of its "
                  "model alone";
        return false;
    }
    if (opts.split_tensors && !opts.spec_type.empty() && !is_simple) {
        mistake = "--spec-type is given without --split-mode tensor";
        return false;
    }
    if (opts.split_tensors && !opts.samplers.empty()) {
        mistake = "--samplers: llama.cpp samples on the CPU with --split-mode tensor";
        return false;
    }
    return true;
}
