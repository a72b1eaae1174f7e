# Faster builds where the tools are there: ccache and mold.
find_program(PENSTOCK_CCACHE ccache)
if(PENSTOCK_CCACHE)
  # Precompiled headers are cached only when ccache is told that they may be. Paths are relative to the clone, so that
  # several clones share their objects.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
      CCACHE_NOHASHDIR=1 ${PENSTOCK_CCACHE})
endif()

find_program(PENSTOCK_MOLD mold)
if(PENSTOCK_MOLD)
  add_link_options(-fuse-ld=mold)
endif()
