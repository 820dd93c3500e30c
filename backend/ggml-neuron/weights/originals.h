// Weights as ggml has them, of layouts from which they can't be restored: pages of the model's file where a program mapped it, else copies.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

// The originals of what is in one buffer, known by where in the buffer ggml has them.
class neuron_originals {
  public:
    neuron_originals() = default;
    ~neuron_originals();
    neuron_originals(const neuron_originals &) = delete;

    // Reserves addresses for the originals of a buffer. They take no memory until they are written to. Returns whether there are some.
    bool reserve(size_t n_bytes);

    explicit operator bool() const { return memory != nullptr; }

    // Keeps a tensor as pages of a GGUF file, when `data` is in a mapping of one that is shared and that nothing writes through (as llama.cpp's
    // are), and the file system tells when it is changed. Else returns false.
    bool keep_pages(size_t at, const uint8_t * data, size_t n);

    // Copies bytes; of a tensor in pages of a file the others, too. Returns "", or why these can't be read any more.
    std::string write(size_t at, const uint8_t * data, size_t n);

    // Returns where bytes are that are not in a file.
    const uint8_t * copy_of(size_t at) const { return memory + at; }

    // Reads bytes. Returns "", or why they can't be read any more.
    std::string read(size_t at, uint8_t * data, size_t n);

    // Sets all bytes to 0.
    void clear();

    // Bytes that are in files.
    size_t in_files();

  private:
    // A second mapping of the pages of a file that have a tensor.
    struct pages {
        uint8_t *   begin = nullptr;
        size_t      size  = 0;
        size_t      first = 0;  // byte of the tensor
        size_t      n     = 0;  // bytes of it
        std::string path;
        std::string state;      // of the file, when they were mapped

        const uint8_t * data() const { return begin + first; }

        std::string failure() const;
    };

    std::string copy_pages(size_t at, size_t n);

    uint8_t *               memory   = nullptr;
    size_t                  reserved = 0;
    std::mutex              mutex;  // held while files are looked at
    std::map<size_t, pages> files;  // by where the tensor begins
};
