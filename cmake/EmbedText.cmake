# Makes of a text file a source that defines a function which returns it:
#   cmake -DINPUT=… -DOUTPUT=… -DHEADER=… -DFUNCTION=… -P EmbedText.cmake
file(READ "${INPUT}" text)
file(WRITE "${OUTPUT}" "#include \"${HEADER}\"\n\nnamespace penstock::internal {\n\nstd::string_view ${FUNCTION}() {\n  static constexpr char kText[] = R\"embedded(${text})embedded\";\n  return {kText, sizeof(kText) - 1};\n}\n\n}  // namespace penstock::internal\n")
