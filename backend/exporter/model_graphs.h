// The graphs of a model, as lines of an export.

#pragma once

#include "options.h"
#include "sparse_file.h"

#include <vector>

// Writes the graphs of a model to standard output.
//
// others  the files of the model's draft, or of the draft's model
void write_model_graphs(const options &                  opts,
                        const std::vector<sparse_file> & files,
                        const std::vector<sparse_file> & others);
