// The graphs of a projector: the graphs that llama.cpp's mtmd computes for an image or for sound, from the header of an
// --mmproj file.

#pragma once

#include "ggml-cpp.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

// Pixels of an image.
struct image_size {
    int32_t width;
    int32_t height;
};

// The input of one call of a projector: images of one size, or a piece of sound. For sound, the width is the number of frames,
// and the height the size of a frame.
struct projector_call {
    bool       audio;
    image_size size;
    size_t     n_images;
};

// A description of one projector in a file. A file may have one for images and one for sound.
struct projector_part {
    std::string type;  // llama.cpp's name: gemma3, ultravox
    int         layers;
};

class projector {
  public:
    // Loads the projectors of a file without memory for weights. Throws std::runtime_error if llama.cpp refuses the file.
    //
    // min_tokens, max_tokens  limits for an image of any size; 0: the file's
    projector(const std::string & path, bool flash_attn, uint32_t min_tokens, uint32_t max_tokens);
    ~projector();

    std::vector<projector_part> parts() const;

    // Sets the callback for llama.cpp's messages and errors.
    static void log_to(void (*log)(enum ggml_log_level level, const char * text, void * user_data));

    using reader = std::function<void(const projector_call & call, ggml_cgraph * graph)>;

    // Passes the graphs of llama.cpp's warm-up to `read`, then the graphs of images and sound, each once: for the sizes
    // to which llama.cpp scales and cuts images of these sizes, and for the pieces into which it cuts sound of these
    // lengths in seconds.
    void graphs(const std::vector<image_size> & images,
                const std::vector<uint32_t> &   seconds,
                const reader &                  read) const;

  private:
    struct loaded;

    std::unique_ptr<loaded> mtmd;
};
