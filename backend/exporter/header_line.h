// The first line of an export.

#pragma once

#include "../graph/graph_writer.h"

// Writes what the first line begins with, before the description of the model.
void begin_header(json_line & out);
