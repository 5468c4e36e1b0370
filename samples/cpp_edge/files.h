// Whole files, and their SHA-256.
#pragma once

#include <string>

namespace flashrnn_edge {

std::string read_file(const std::string& path);                         // throws Error
void write_file(const std::string& path, const std::string& contents);  // by renaming: all of it or nothing
std::string file_name(const std::string& path);                         // without its folders
std::string sha256(const std::string& bytes);                           // in hexadecimal (FIPS 180-4)

}  // namespace flashrnn_edge
