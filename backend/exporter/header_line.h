// The first line of an export.

#pragma once

#include "../graph/graph_writer.h"

// Writes the start of the first line, before the model's description.
void begin_header(json_line & out);
