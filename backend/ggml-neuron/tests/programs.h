// Headers that most files of the test programs include, compiled once per program.

#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-impl.h"
#include "ggml.h"

#include <algorithm>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>
