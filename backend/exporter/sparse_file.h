// A GGUF file with its header only, extended to the length that the header gives.

#pragma once

#include "ggml.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

// The header of a file, in memory. llama.cpp refuses a file that is shorter than its tensors; here everything after the
// header is a hole, which takes no memory.
class sparse_file {
  public:
    // Reads the header of the file at `path`. Throws std::runtime_error when it has none.
    //
    // with_numbers  also read tensors that are a single F32 number: graphs of projectors depend on some of them
    explicit sparse_file(const std::string & path, bool with_numbers = false);
    ~sparse_file();
    sparse_file(sparse_file && other) noexcept;
    sparse_file(const sparse_file &)             = delete;
    sparse_file & operator=(const sparse_file &) = delete;

    // The path under which llama.cpp can open it.
    const std::string & path() const { return opened_path; }

    const std::vector<std::string> & tensor_names() const { return names; }

    // The number of files of the model.
    int n_files() const { return split_count; }

    // Changes the types of tensors, as if the file had been quantized. Ignores names that the file does not have.
    void set_types(const std::map<std::string, ggml_type> & types);

  private:
    void read_numbers(const struct gguf_context * header, int source, const std::string & path) const;
    void read_tensors(const struct gguf_context * header, const std::string & path);

    std::unique_ptr<struct memory_file> file;
    std::string                         opened_path;
    std::vector<std::string>            names;
    int                                 split_count = 1;
};

// Opens a model's file, or all files of a split model whose first file is `path`. Throws std::runtime_error.
std::vector<sparse_file> open_model_files(const std::string & path);
